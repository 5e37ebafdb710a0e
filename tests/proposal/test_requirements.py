"""Test requirements beside the budget: weights, memory, ranges of budgets; and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import fails, make_domain_table, make_table

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.units import format_bytes, parse_bytes, parse_context
from spkv_nas.cli import main
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.cost.formulas import kv_cache_bytes
from spkv_nas.proposal.answers import budget_curve, curve_for, find_knee
from spkv_nas.proposal.budget import parse_budgets
from spkv_nas.proposal.constraints import Constraints, read_head_costs, solve
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.stages.engines import read_requirements
from spkv_nas.stages.options.propose import ProposeOptions

Mask = np.ndarray


class TestWeights:
    def read(self, folder: Path, text: str) -> np.ndarray:
        (folder / "w.csv").write_text(f"layer,kv_head,weight\n{text}")
        return read_head_costs(folder / "w.csv", make_table([[0.5, 0.4]]))

    def test_the_budget_is_in_their_unit(self, tmp_path: Path) -> None:
        weights = self.read(tmp_path, "0,1,2.5\n0,0,3.0\n")
        assert weights.tolist() == [[3.0, 2.5]]
        layout = solve(make_table([[0.5, 0.4]]), 2.9, weights=weights)
        assert (layout.heads, layout.provenance["weight"]) == (("LG",), 2.5)

    def test_a_small_unit_changes_nothing(self) -> None:
        """Rows of the program are scaled, so that the tolerance of 1e-6 is relative."""
        table = make_table([[0.5, 0.4, 0.25, 0.2]])
        weights = np.array([[3.0, 2.0, 2.0, 1.0]])
        assert (
            solve(table, 4e-7, weights=1e-7 * weights).heads
            == solve(table, 4, weights=weights).heads
            == ("GLLG",)
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "0,0,1\n",
                "needs one row for every head of the density table 'p', 1 layers x 2 KV heads",
            ),
            ("0,0,1\n1,0,1\n", "up to layer 1"),
            ("0,0,1\n0,0,1\n", "one head is listed twice, and a head of layer 0 is missing"),
            ("0,0,1\n0,1,0\n", "line 3: column 'weight' must be a number above 0; found '0'"),
            ("0,0,1\n0,1,x\n", "line 3: column 'weight' must be a number"),
        ],
    )
    def test_files_that_do_not_fit(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(UserError) as error:
            self.read(tmp_path, text)
        assert message in str(error.value)
        assert "w.csv" in str(error.value)

    def test_weights_of_another_shape(self) -> None:
        with pytest.raises(UserError, match=r"have shape \[1, 2\]; found shape \[2, 1\]"):
            solve(make_table([[0.5, 0.4]]), 1, weights=np.ones((2, 1)))


class TestMemory:
    cost = CacheCost(context=131072, batch=16, window=128, head_dim=128, dtype="bfloat16")

    def test_bytes(self) -> None:
        assert self.cost.global_head == 2 * 131072 * 128 * 2 * 16
        assert self.cost.local_head == 2 * 128 * 128 * 2 * 16
        assert self.cost.total(3, 10) == 3 * self.cost.global_head + 7 * self.cost.local_head
        shape = Shape(num_layers=2, num_heads=5, num_kv_heads=5, head_dim=128, num_parameters=0)
        assert self.cost.total(3, 10) == pytest.approx(
            16 * kv_cache_bytes(shape, 131072, density=0.3, window=128)
        )

    def test_the_largest_budget_fits_and_the_next_does_not(self) -> None:
        for number in (1, 7, 639, 640):
            limit = self.cost.total(number, 640)
            assert self.cost.largest_budget(limit, 640) == number
            assert self.cost.largest_budget(limit + self.cost.global_head // 2, 640) == number
        with pytest.raises(UserError, match="is too small: "):
            self.cost.largest_budget(self.cost.total(1, 640) - 1, 640)

    def test_sink_tokens_of_local_heads(self) -> None:
        """A local head keeps its window and the sink tokens, at most the context; a global head keeps everything."""
        cost = replace(self.cost, sinks=4)
        assert cost.local_head == 2 * 132 * 128 * 2 * 16
        assert cost.global_head == self.cost.global_head
        assert replace(cost, context=130).local_head == replace(cost, context=130).global_head
        table = replace(
            make_table([[0.5, 0.4]]),
            window=128,
            record=ProbeRecord.of({"sinks": 4, "head_dim": 128}),
        )
        requirements = Requirements(context=131072, batch=16, kv_dtype="bfloat16")
        assert requirements.cache_cost(table, None) == cost
        with pytest.raises(UserError, match="--sinks must be at least 0"):
            replace(cost, sinks=-1)

    def test_a_table_without_sizes_has_no_memory(self) -> None:
        with pytest.raises(
            UserError, match="'p' does not record the model's head_dim, which the memory depends on"
        ):
            Requirements(context=9).cache_cost(make_table([[0.5]]), None)

    def test_a_context_within_the_window(self) -> None:
        short = CacheCost(context=64, batch=1, window=128, head_dim=8, dtype="float32")
        assert short.largest_budget(short.total(0, 10), 10) == 10
        with pytest.raises(UserError, match="is too small: "):
            short.largest_budget(10, 10)

    @pytest.mark.parametrize(
        ("text", "number"),
        [("2GiB", 2**31), ("1.5 gb", 1500000000), ("2e9", 2 * 10**9), ("512", 512)],
    )
    def test_sizes(self, text: str, number: int) -> None:
        assert parse_bytes(text) == number

    @pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 cows", "0", "nan", "1e99"])
    def test_sizes_that_make_no_sense(self, text: str) -> None:
        with pytest.raises(UserError, match="not a size"):
            parse_bytes(text)

    def test_sizes_as_text(self) -> None:
        assert [format_bytes(n) for n in (5, 2048, 2**31)] == ["5 B", "2.00 KiB", "2.00 GiB"]

    def test_contexts(self) -> None:
        assert [parse_context(text) for text in ("128k", "8K", " 512 ")] == [131072, 8192, 512]


def test_several_budgets() -> None:
    assert parse_budgets("24,12, 18", 63) == [12, 18, 24]
    assert parse_budgets("6..9,25%,7", 63) == [6, 7, 8, 9, 16]
    for text in ("12,", ",", "12,x", "12,99", "12,9..6"):
        with pytest.raises(UserError, match="budget"):
            parse_budgets(text, 63)


def test_ranges() -> None:
    assert parse_budgets("6..9", 63) == [6, 7, 8, 9]
    assert parse_budgets("10%..50%:20", 63) == [6, 26, 32]
    for text in ("9..6", "0..4", "..", "1..99", "1..4:0", "1..4:x", "1..2..3"):
        with pytest.raises(UserError, match="budget"):
            parse_budgets(text, 63)


def test_every_budget_is_as_good_as_its_own_proposal() -> None:
    table = make_domain_table(("code", "docs"), record=ProbeRecord.of({"head_dim": 8}))
    curve = budget_curve(table, Requirements(context=1024, kv_dtype="float16"), [1, 3, 8])
    rows = curve.rows
    assert list(curve.layouts) == ["densest-1", "densest-3", "densest-8"]
    assert rows["coverage"].tolist() == pytest.approx([1 / 3.4, 2.3 / 3.4, 1.0])
    assert rows["random"].tolist() == [1 / 8, 3 / 8, 1.0]
    assert rows["kv_bytes"].iloc[-1] == 8 * 2 * 1024 * 8 * 2
    assert rows["coverage_low"].isna().all()
    solved = budget_curve(table, Requirements(Constraints(granularity="layer")), [2, 4, 6])
    assert solved.rows["coverage"].tolist() == pytest.approx([1.2 / 3.4, 2.2 / 3.4, 3.0 / 3.4])


def test_the_knee_is_where_the_curve_lies_farthest_above_chance() -> None:
    table = make_domain_table(("code",))
    curve = curve_for(table, None, "1..8")
    rows = curve.rows
    best = rows.loc[(rows["coverage"] - rows["random"]).idxmax(), "budget"]
    assert curve.knee.budget == best == (table.density > table.density.mean()).sum()
    assert "adds less than average" in curve.knee.meaning
    inner = Requirements(Constraints(max_per_layer=2))
    assert find_knee(table, inner, rows).budget == best
    assert "may lie outside it" in find_knee(table, inner, rows.iloc[:2]).meaning


def test_requirements_from_the_texts_of_options() -> None:
    requirements = read_requirements(
        ProposeOptions(context="8k", constraint=["global-layers=0,2-3", "uniform"])
    )
    assert requirements == Requirements(
        Constraints(uniform=True, global_layers=(0, 2, 3)), context=8192
    )
    assert read_requirements(ProposeOptions()) == Requirements()


class TestCommand:
    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Path:
        density = np.random.default_rng(0).random((6, 3)).round(4)
        replace(
            make_table(density), record=ProbeRecord.of({"head_dim": 32, "dtype": "bfloat16"})
        ).write(tmp_path / "probes" / "p")
        return tmp_path

    def propose(self, workspace: Path, *options: str) -> None:
        main(
            [
                "propose",
                "--probe",
                "p",
                "--num-random",
                "0",
                "--workspace",
                str(workspace),
                *options,
            ]
        )

    def test_a_constrained_layout_joins_the_others(
        self, workspace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.propose(workspace, "--budget", "6", "--constraint", "max-per-layer=1", "--robust")
        printed = " ".join(capsys.readouterr().out.split())
        assert "no confidence interval available" in printed
        layout = Layout.read(workspace / "layouts" / "p" / "robust.yaml")
        assert layout.heads == tuple(
            "".join("G" if j == row.argmax() else "L" for j in range(3))
            for row in HeadScores.read(workspace / "probes" / "p").density
        )
        self.propose(workspace, "--budget", "6")
        assert not (workspace / "layouts" / "p" / "robust.yaml").exists()

    def test_a_range_writes_curve_layouts_and_figure(self, workspace: Path) -> None:
        self.propose(workspace, "--budget", "2..8:3", "--constraint", "uniform")
        folder = workspace / "layouts" / "p"
        assert pd.read_csv(folder / "budgets.csv")["budget"].tolist() == [2, 5, 8]
        assert sorted(path.name for path in (folder / "budgets").glob("[!.]*")) == [
            "constrained-2.yaml",
            "constrained-5.yaml",
            "constrained-8.yaml",
        ]
        assert (folder / "budgets.png").is_file()
        self.propose(workspace, "--budget", "20%..50%")
        assert {path.stem for path in (folder / "budgets").glob("*.yaml")} == {
            f"densest-{n}" for n in range(4, 10)
        }
        kept = (folder / "budgets" / "earlier").iterdir()  # with a constraint, thus of other inputs
        assert sorted(path.name.rpartition("-")[0] for path in kept) == [
            "constrained-2",
            "constrained-5",
            "constrained-8",
        ]
        assert not list(folder.glob("*.yaml"))

    def test_memory_in_place_of_a_budget(
        self, workspace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        memory = ["--kv-bytes", "1MiB", "--context", "1000"]
        self.propose(workspace, *memory)
        assert Layout.read(workspace / "layouts" / "p" / "densest.yaml").num_global == 8
        assert "1MiB has room for 8 global heads: 1010.00 KiB" in " ".join(
            capsys.readouterr().out.split()
        )
        self.propose(workspace, "--budget", "8", "--context", "128k")
        assert "128.01 MiB of keys and values at 131,072 tokens x 1" in " ".join(
            capsys.readouterr().out.split()
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ["--budget=4", "--constraint=min-per-layer=1"],
                "the budget of 4 and --constraint min-per-layer=1",
            ),
            (
                ["--constraint=min-per-layer=2", "--constraint=max-per-layer=1"],
                "min-per-layer=2 is more than",
            ),
            (
                ["--constraint=global-layers=1", "--constraint=local-layers=0-2"],
                "layer 1 is in global-layers and in",
            ),
            (["--constraint=global-layers=9"], "the model has no layer 9"),
            (["--constraint=local-layers=first"], "is not a list of layers"),
            (["--constraint=per-layer=1"], "'per-layer=1': expected min-per-layer=N"),
            (["--granularity=block"], "must be head or layer"),
            (["--head-costs=none.csv"], "head costs not found"),
            (["--kv-bytes=2GiB"], "needs --context"),
            (["--kv-bytes=2GiB", "--budget=4"], "not both"),
            (["--kv-bytes=9", "--context=9"], "is too small: 1 requests of 9 tokens"),
            (["--engine=vllm:kv-dtype=int3", "--context=9"], "kv-dtype must be one of float32"),
            (["--kv-bytes=9GiB", "--context=0"], "at least 1 token; found 0"),
            (["--budget=4", "--context=many"], "context 'many' is not a number of tokens"),
            (["--budget=9..2"], "is descending, from 9 to 2"),
            (["--budget=1..9", "--tau=match-budget"], "needs a single budget"),
            (["--budget=1..9", "--kv-bytes=9GiB"], "--memory needs a single budget"),
        ],
    )
    def test_bad_input(
        self, options: list[str], message: str, workspace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = sorted(workspace.rglob("*"))
        assert message in fails(
            capsys, "propose", "--probe=p", f"--workspace={workspace}", *options
        )
        assert sorted(workspace.rglob("*")) == before

    def test_weights_of_another_model(
        self, workspace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (workspace / "w.csv").write_text("layer,kv_head,weight\n0,0,1\n")
        options = [
            "--probe=p",
            f"--workspace={workspace}",
            f"--head-costs={workspace / 'w.csv'}",
            "--budget=1",
        ]
        assert (
            "needs one row for every head of the density table 'p', 6 layers x 3 KV heads"
            in fails(capsys, "propose", *options)
        )
        cells = (f"{layer},{head},1" for layer in range(6) for head in range(3))
        (workspace / "w.csv").write_text("layer,kv_head,weight\n" + "\n".join(cells))
        assert "needs --budget in the unit" in fails(capsys, "propose", *options[:3])
        assert "at most 18, the weight of all heads" in fails(
            capsys, "propose", *options[:3], "--budget=19"
        )
