"""Test that changes of NLL count from the dense model, and that retraining that harms the control is warned about."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import RECIPE, MessageLog, fails, make_comparison, write_project
from rich.console import Console

from spkv_nas.artifacts.comparison import (
    DENSE,
    FULL_ATTENTION,
    check_layout_names,
    counted_from,
    read_comparison,
    write_comparison,
)
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.stages import train_hybrid as stage
from spkv_nas.training.branches import Branch, BranchContext
from spkv_nas.training.hybrids import Comparison, caution_if_worse, compare_control, comparison_rows
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

TOKENS = np.full(8, 100)
FINISHED = """\
name: finished
model: {path: dense}
data: {sources: [text]}
branch: {steps: 40, learning_rate: 1e-3}
"""


def nll(percent: float, spread: float = 0.01) -> DocumentNLL:
    """Return NLL of 2 nats per token, ``percent`` higher, give or take ``spread`` percent by document."""
    each = 1.0 + (percent + spread * np.tile([1.0, -1.0], 4)) / 100.0
    return DocumentNLL(2.0 * TOKENS * each, TOKENS)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(FINISHED)
    return Recipe.read(tmp_path / "recipe.yaml")


@pytest.fixture
def rows(recipe: Recipe) -> pd.DataFrame:
    """Return the dense model, a control harmed by 1 % in retraining, and a layout 2 % above the dense model."""
    branches = {FULL_ATTENTION: nll(1.0), "a": nll(2.0)}
    finished = {name: [Branch(Path(), measured, None, 40)] for name, measured in branches.items()}
    variants = {
        FULL_ATTENTION: Variant.full_attention(),
        "a": Variant.hybrid(Layout(("GL", "LG"), 8, "a")),
    }
    untrained = {DENSE: nll(0.0, 0.0), "a": nll(3.0)}
    return comparison_rows(finished, variants, {"a": 0.5}, untrained, recipe, {})


class TestTable:
    def test_changes_count_from_the_dense_model(self, rows: pd.DataFrame) -> None:
        """Not from the control, which retraining may have harmed."""
        table = rows.set_index("strategy")
        assert list(table.index) == [DENSE, FULL_ATTENTION, "a"]
        assert table["delta_nll_percent"].tolist()[1:] == pytest.approx([1.0, 2.0])
        assert table["delta_control_percent"].tolist()[::2] == pytest.approx(
            [100 * (1 / 1.01 - 1), 100 * 0.01 / 1.01]
        )
        assert math.isnan(table.loc[DENSE, "delta_nll_percent"])
        assert math.isnan(table.loc[FULL_ATTENTION, "delta_control_percent"])
        assert table.loc[DENSE, ["nll", "zero_shot_nll", "steps", "num_seeds"]].tolist() == [
            2.0,
            2.0,
            0,
            0,
        ]
        assert table.loc["a", "zero_shot_delta_percent"] == pytest.approx(3.0)

    def test_a_file_states_its_baseline(self, rows: pd.DataFrame, tmp_path: Path) -> None:
        write_comparison(tmp_path / "comparison.csv", rows)
        read = read_comparison(tmp_path / "comparison.csv").set_index("strategy", drop=False)
        assert counted_from(read) == DENSE
        assert (
            read.loc[DENSE, "delta_nll_percent"]
            == read.loc[FULL_ATTENTION, "delta_control_percent"]
            == 0.0
        )
        assert read.loc[FULL_ATTENTION, "delta_nll_percent"] == pytest.approx(1.0)

    def test_an_older_file_counts_from_the_control(self, tmp_path: Path) -> None:
        write_comparison(tmp_path / "comparison.csv", make_comparison())
        read = read_comparison(tmp_path / "comparison.csv").set_index("strategy", drop=False)
        assert counted_from(read) == FULL_ATTENTION
        assert (
            read["delta_control_percent"].tolist()
            == read["delta_nll_percent"].tolist()
            == [0.0, 0.05, 0.2, 0.3, 0.5]
        )
        assert read["delta_control_standard_error"].tolist()[1:] == [0.01] * 4

    def test_no_layout_is_called_as_the_dense_row(self) -> None:
        with pytest.raises(UserError, match="'dense' is reserved for a baseline"):
            check_layout_names([DENSE])

    def test_people_see_both_baselines(
        self, rows: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = io.StringIO()
        monkeypatch.setattr(stage, "out", Console(file=written, width=120))
        stage.show(Comparison(rows, (), Path(), {DENSE: nll(0.0)}))
        printed = written.getvalue()
        assert "relative to that checkpoint as it is" in printed
        assert [
            line for line in printed.splitlines() if "dense, as it is" in line and "2.0000" in line
        ]
        assert [
            line
            for line in printed.splitlines()
            if "control: full attention" in line and "+1.000" in line
        ]


class TestHarm:
    def test_a_harmed_control_is_warned_of_with_advice(self, recipe: Recipe) -> None:
        messages = MessageLog()
        compare_control(nll(1.15), nll(0.0), recipe, messages.reporter)
        assert messages.announced == []
        (caution,) = messages.cautioned
        assert "1.15 ± 0.00 % more NLL than the dense model as it is" in caution
        assert (
            "branch.learning_rate: 0.0003 (now 0.001) and branch.warmup_steps: 4 (now 0)" in caution
        )

    @pytest.mark.parametrize(
        ("percent", "spread", "message"),
        [
            (-0.42, 0.01, "0.42 ± 0.00 % less NLL than the dense model"),
            (0.09, 0.01, "0.09 ± 0.00 % more NLL"),
            (0.3, 1.0, "0.30 ± 0.38 % more NLL"),  # within its error, so it is said and no caution
        ],
        ids=["better", "little", "uncertain"],
    )
    def test_any_other_change_is_announced(
        self, percent: float, spread: float, message: str, recipe: Recipe
    ) -> None:
        messages = MessageLog()
        compare_control(nll(percent, spread), nll(0.0, 0.0), recipe, messages.reporter)
        assert messages.cautioned == []
        assert len(messages.announced) == 1
        assert message in messages.announced[0]

    def test_few_documents_show_no_harm(self, recipe: Recipe) -> None:
        messages = MessageLog()
        few = [DocumentNLL(each.total[:7], each.num_tokens[:7]) for each in (nll(1.0), nll(0.0))]
        compare_control(*few, recipe, messages.reporter)
        caution_if_worse("densest", *few, messages.reporter)
        assert messages.cautioned == []
        assert (
            "on 7 documents: too few to say whether retraining harms the model"
            in messages.announced[0]
        )

    def test_with_warm_up_only_a_lower_rate_is_advised(self, recipe: Recipe) -> None:
        messages = MessageLog()
        warmed = recipe.model_copy(
            update={"branch": recipe.branch.model_copy(update={"warmup_steps": 4})}
        )
        compare_control(nll(1.0), nll(0.0), warmed, messages.reporter)
        assert "warmup_steps" not in messages.cautioned[0]

    def test_a_layout_that_retraining_made_worse_is_named(self) -> None:
        messages = MessageLog()
        caution_if_worse("interleaved-last", nll(0.5), nll(0.0), messages.reporter)
        caution_if_worse("densest", nll(-0.5), nll(0.0), messages.reporter)
        assert len(messages.cautioned) == 1
        assert "interleaved-last has 0.50 ± 0.00 % more NLL retrained" in messages.cautioned[0]


@pytest.mark.parametrize("file", ["demo.yaml", "search.yaml"])
def test_the_embedded_recipes_warm_up_to_a_rate_that_does_no_harm(file: str) -> None:
    branch = Recipe.read(EMBEDDED / file).branch
    assert branch.learning_rate == (1e-4 if branch.distill is None else 3e-4)
    assert branch.warmup_steps == branch.steps // 10


def test_gates_that_are_not_trained_warn_of_nothing(
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise UserError("stopped")

    recipe_file.write_text(recipe_file.read_text().replace("bias: 0.2", "bias: 5.0"))
    assert Recipe.read(recipe_file).warnings()
    table, layout = tmp_path / "mine.csv", tmp_path / "mine.yaml"
    table.write_text(
        "layer,kv_head,density\n" + "".join(f"{i // 2},{i % 2},0.5\n" for i in range(4))
    )
    Layout(("GL", "LG"), 8, "mine").write(layout)
    monkeypatch.setattr("spkv_nas.training.hybrids.train_by_recipe", stop)
    command = [
        "train-hybrid",
        layout,
        "--probe",
        table,
        "--recipe",
        recipe_file,
        "--workspace",
        tmp_path,
    ]
    assert "gates can hardly close" in fails(capsys, *command)
    assert "gates can hardly close" not in fails(capsys, *command, "--no-reference")


@pytest.mark.slow
def test_the_control_is_compared_before_layouts_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control that improves after a dense phase without decay is reported too."""
    recipe_file = write_project(tmp_path / "project", RECIPE)
    options = ["--workspace", str(tmp_path / "workspace")]
    main(["train", str(recipe_file), *options])
    table, layout = tmp_path / "mine.csv", tmp_path / "mine.yaml"
    table.write_text(
        "layer,kv_head,density\n" + "".join(f"{i // 2},{i % 2},0.5\n" for i in range(4))
    )
    Layout(("GL", "LG"), 8, "mine").write(layout)
    monkeypatch.chdir(tmp_path)
    order: list[str] = []
    train = BranchContext.train

    def watched(context: BranchContext, variant: Variant, *seed: int) -> Branch:
        order.append(variant.name)
        return train(context, variant, *seed)

    monkeypatch.setattr(BranchContext, "train", watched)
    compare: Any = lambda *inputs: order.append("compared") or compare_control(*inputs)  # noqa: E731
    monkeypatch.setattr("spkv_nas.training.hybrids.compare_control", compare)
    command = [
        "train-hybrid",
        str(layout),
        "--probe",
        str(table),
        "--recipe",
        str(recipe_file),
        *options,
    ]
    main([*command, "--no-reference"])
    assert order == [FULL_ATTENTION, "compared", "mine"]
    order.clear()
    main(command)
    assert order == [FULL_ATTENTION, "compared", "sp-kv", "mine"]
    shown = capsys.readouterr()
    assert "NLL than the dense model as it is" in shown.err
    assert "the recipe's dense phase ends at its peak learning rate" in shown.err
    assert "dense, as it is" in shown.out
