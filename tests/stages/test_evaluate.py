"""Test evaluating two checkpoints on the same documents, under the name of the recipe that they belong to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import Page, fails, gated, make_layouts, make_table, tiny_model
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import RULER
from spkv_nas.base.manifest import write_manifest
from spkv_nas.cli import main
from spkv_nas.data.blocks import build_blocks
from spkv_nas.data.config import SEPARATE
from spkv_nas.data.sources import documents
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.windows import apply_layout

BLOCK = 32


@pytest.fixture
def workspace(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Workspace with a dense model, and a retrained hybrid of it where ``train-hybrid`` writes one."""
    runs = tmp_path / "w" / "runs" / "mine"
    save(tiny_model(vocab_size=300), tiny_tokenizer, runs / "dense-0123456789abcdef" / "final")
    hybrid = tiny_model(vocab_size=300)
    apply_layout(hybrid, Layout(("LL", "GL") * 2, window=2))
    final = runs / "branches" / "densest-0123456789abcdef" / "final"
    save(hybrid, tiny_tokenizer, final)
    write_run(final, "densest")
    return tmp_path / "w"


def write_run(final: Path, variant: str) -> None:
    """Write the record of a finished run, as training does."""
    (final / "run.json").write_text(json.dumps({"variant": variant, "recipe": {"name": "mine"}}))
    write_manifest(final)


def checkpoints(workspace: Path) -> tuple[Path, Path]:
    """Return the hybrid's folder and the dense model's."""
    (hybrid,), (dense,) = (
        [*(workspace / "runs/mine").glob(where)] for where in ("branches/*/final", "dense-*/final")
    )
    return hybrid, dense


def evaluate(workspace: Path, text: Path, model: Path, *extra: object) -> None:
    options = [
        "--model",
        model,
        "--data",
        text,
        "--context",
        BLOCK,
        "--workspace",
        workspace,
        *extra,
    ]
    main(["evaluate", *map(str, options)])


class TestPair:
    def test_the_difference_is_paired_by_document(
        self, workspace: Path, text: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hybrid, dense = checkpoints(workspace)
        evaluate(workspace, text, hybrid, "--against", dense)
        blocks = build_blocks(
            documents([str(text)], Path()), load(dense)[1], BLOCK, documents=SEPARATE
        )
        nll, baseline = (document_nll(load(folder)[0], blocks) for folder in (hybrid, dense))
        expected = paired_difference(nll, baseline)
        assert expected.standard_error > 0
        rows = pd.read_csv(
            workspace / "reports/mine/evaluation.csv", dtype={"text": str}
        ).set_index("variant")
        assert rows.index.fillna("").tolist() == ["", "densest"]
        densest = rows.loc["densest"]
        assert densest["nll"] == pytest.approx(nll.mean, rel=1e-5)
        assert densest["delta_nll_percent"] == pytest.approx(expected.percent, rel=1e-4)
        assert densest["delta_nll_standard_error"] == pytest.approx(
            expected.standard_error, rel=1e-4
        )
        assert (densest["checkpoint"], densest["against"]) == (str(hybrid), str(dense))
        tokens = nll.num_tokens
        assert densest["num_documents"] == (tokens > 0).sum() > 1
        assert densest["effective_documents"] == pytest.approx(
            tokens.sum() ** 2 / (tokens**2).sum(), rel=1e-5
        )
        printed = " ".join(capsys.readouterr().out.split())
        assert f"difference {expected.percent:+.3f} ± {expected.standard_error:.3f} %" in printed
        assert "paired by" in printed
        assert f"(effective number {densest['effective_documents']:.1f})" in printed

    def test_json(self, workspace: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
        hybrid, dense = checkpoints(workspace)
        evaluate(workspace, text, hybrid, "--against", dense, "--json")
        document = json.loads(capsys.readouterr().out)
        assert document["against"]["model"] == str(dense)
        assert len(document["against"]["checkpoints"]) == 2

    def test_one_row_per_checkpoint(
        self,
        workspace: Path,
        text: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """A third checkpoint is added, a repeated one replaces its row, and another text starts a new table."""
        hybrid, dense = checkpoints(workspace)
        save(gated(), tiny_tokenizer, workspace / "gated")
        for model, baseline in (
            (hybrid, dense),
            (workspace / "gated", dense),
            (hybrid, workspace / "gated"),
            (hybrid, dense),
        ):
            evaluate(workspace, text, model, "--against", baseline, "--name", "mine")
        rows = pd.read_csv(
            workspace / "reports/mine/evaluation.csv", dtype={"text": str}
        ).set_index("checkpoint")
        against = {str(dense): "", str(workspace / "gated"): str(dense), str(hybrid): str(dense)}
        assert rows["against"].fillna("").to_dict() == against
        capsys.readouterr()
        evaluate(workspace, text, hybrid, "--against", dense, "--max-tokens", 64)
        assert "kept the earlier result, of other inputs, as" in capsys.readouterr().err
        assert len(pd.read_csv(workspace / "reports/mine/evaluation.csv")) == 2

    def test_checkpoints_that_cannot_be_paired(
        self, workspace: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hybrid, _ = checkpoints(workspace)
        options = ["evaluate", "--model", hybrid, "--data", text, "--workspace", tmp_path / "new"]
        assert "has a different tokenizer" in fails(capsys, *options, "--against", "embedded:dense")
        assert not list((tmp_path / "new").rglob("*.csv"))


class TestName:
    @pytest.mark.slow
    def test_the_report_of_the_probe_shows_it(self, workspace: Path, text: Path) -> None:
        """Results of a run are filed under its probe."""
        hybrid, dense = checkpoints(workspace)
        table = make_table(np.linspace(0.1, 0.9, 8).reshape(4, 2))
        replace(table, name="mine").write(workspace / "probes" / "mine")
        for name, layout in make_layouts("densest", "random-0").items():
            layout.write(workspace / "layouts" / "mine" / f"{name}.yaml")
        evaluate(workspace, text, hybrid, "--against", dense)
        main(["report", "--probe", "mine", "--workspace", str(workspace)])
        page = Page((workspace / "reports/mine/index.html").read_text())
        assert "Checkpoints side by side" in page.texts["h2"]
        assert "densest (densest-0123456789abcdef)" in page.texts["th"]

    @pytest.mark.slow
    @pytest.mark.filterwarnings(
        "ignore:sequences of"
    )  # the questions are longer than the model's context
    def test_every_evaluation_takes_the_recipe_name(self, workspace: Path, text: Path) -> None:
        """--name takes precedence, and a checkpoint without a run has its folder's name."""
        hybrid, dense = checkpoints(workspace)
        save(gated(), load(dense)[1], hybrid)  # gates, as a reference's run has them
        write_run(hybrid, "sp-kv")
        options = [
            "--model",
            hybrid,
            "--data",
            text,
            "--context",
            BLOCK,
            "--taus",
            "0.3,0.6",
            "--workspace",
            workspace,
        ]
        main(["evaluate", *map(str, options)])
        assert (workspace / "reports/mine/tau-sweep.csv").is_file()
        main(["evaluate", *map(str, options), "--name", "other"])
        assert (workspace / "reports/other/tau-sweep.csv").is_file()
        ruler = ["--lengths", "400", "--tasks", "niah_single_1", "--samples", "1"]
        main(["evaluate", "ruler", "--model", str(hybrid), *ruler, "--workspace", str(workspace)])
        assert RULER.read(workspace / "reports/mine") is not None
        assert {folder.name for folder in (workspace / "reports").iterdir()} == {"mine", "other"}
