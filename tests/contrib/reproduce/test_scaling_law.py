"""Test the scaling law against the paper's table and fit, and the output of ``spkv-nas reproduce scaling``."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers import fails

from spkv_nas.base.assets import PAPER_TABLE
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.contrib.reproduce.scaling.stage import fit, fit_runs, read_runs, scaling_chart
from spkv_nas.report.plot import draw

with PAPER_TABLE.open(newline="") as _file:
    TABLE = {row["name"]: row for row in csv.DictReader(_file)}
FLOPS = [float(row["train_flops"]) for row in TABLE.values() if row["held_out"] == "0"]
NLL = [float(row["nll"]) for row in TABLE.values() if row["held_out"] == "0"]


class TestLaw:
    def test_known_parameters_are_recovered(self) -> None:
        compute = np.geomspace(1e18, 1e22, 9)
        law = fit(compute, 1.7 + 400 * compute**-0.12)
        result = [law.irreducible, law.amplitude, law.exponent]
        assert [i.value for i in result] == pytest.approx([1.7, 400, 0.12], rel=1e-6)
        assert [i.high - i.low for i in result] == pytest.approx([0, 0, 0], abs=1e-4)
        assert law.r_squared == pytest.approx(1.0)
        assert law.predict(1e24).value == pytest.approx(1.7 + 400 * 1e24**-0.12)

    def test_the_papers_fit(self) -> None:
        """R^2 > 0.999 over levels 0 to 10 (section "Scaling analysis"); level 13, not fitted, within 1.5 %."""
        law = fit(FLOPS, NLL)
        assert law.num_runs == 11
        assert law.r_squared > 0.9995
        level_13 = law.predict(5.71e22)
        assert level_13.value == pytest.approx(1.9365, abs=5e-4)
        assert level_13.low < 1.95 < level_13.high

    def test_least_squares(self) -> None:
        """No neighbouring parameters fit better."""
        law = fit(FLOPS, NLL)
        best = ((law(FLOPS) - NLL) ** 2).sum()
        steps = 0.1 * np.linalg.cholesky(law.covariance)
        for step in [*steps.T, *-steps.T]:
            assert ((replace(law, parameters=law.parameters + step)(FLOPS) - NLL) ** 2).sum() > best

    def test_intervals_have_the_stated_coverage(self) -> None:
        """95 % intervals miss at most 28 of 400 noisy ladders."""
        generator = np.random.default_rng(0)
        truth = 0.98 + 89.2 * np.array(FLOPS) ** -0.0866
        laws = [fit(FLOPS, truth + generator.normal(0, 0.006, len(FLOPS))) for _ in range(400)]
        for intervals, value in (
            ([law.exponent for law in laws], 0.0866),
            ([law.irreducible for law in laws], 0.98),
            ([law.amplitude for law in laws], 89.2),
        ):
            misses = sum(not i.low <= value <= i.high for i in intervals)
            assert 5 <= misses <= 28
        new = 0.98 + 89.2 * 5.71e22**-0.0866 + generator.normal(0, 0.006, 400)
        ahead = [law.predict(5.71e22) for law in laws]
        assert 5 <= sum(not i.low <= run <= i.high for i, run in zip(ahead, new, strict=True)) <= 28

    @pytest.mark.parametrize(
        ("nll", "message"),
        [
            ([2.0, 2.1, 2.3, 2.4, 2.5], "does not fall"),
            ([2.0, 2.0, 2.0, 2.0, 2.0], "does not fall"),
            ([3.0, 2.8, 2.6, 2.4, 2.2], "straight line in log compute"),
            ([3.0, 2.95, 2.8, 2.5, 1.9], "straight line in log compute or faster"),
            ([3.0, 2.0, 2.0, 2.0, 2.0], "falls in one step"),
        ],
    )
    def test_runs_without_a_law(self, nll: list[float], message: str) -> None:
        with pytest.raises(UserError, match=message):
            fit(np.geomspace(1e18, 1e22, 5), nll)


class TestScalingCommand:
    def runs(self, path: Path, **columns: Any) -> Path:
        table = {
            "train_flops": [1e18, 1e19, 1e20, 1e21, 1e22],
            "nll": [3.0, 2.7, 2.5, 2.36, 2.26],
            **columns,
        }
        pd.DataFrame({key: value for key, value in table.items() if value is not None}).to_csv(
            path, index=False
        )
        return path

    def test_the_papers_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["reproduce", "scaling", "--workspace", str(tmp_path)])
        output = " ".join(capsys.readouterr().out.split())
        assert "R² 0.99968 over 11 runs" in output
        assert "held out: level-13 predicted 1.9365" in output
        assert "1.9500 (-0.69 %)" in output
        folder = tmp_path / "reports" / "paper"
        assert {p.name for p in folder.glob("[!.]*")} == {
            "scaling.yaml",
            "scaling.png",
            "scaling.svg",
            "scaling.pdf",
        }
        written = yaml.safe_load((folder / "scaling.yaml").read_text())
        law = written["fits"][0]
        assert law["r_squared"] > 0.999
        value, low, high = law["parameters"]["L_inf"]
        assert low < value < high
        assert [run["name"] for run in law["runs"] if run["held_out"]] == ["llama-3-8b", "level-13"]
        assert "commit" in written["environment"]
        drawn = "".join(ElementTree.parse(folder / "scaling.svg").getroot().itertext())
        assert all(word in drawn for word in ("Training compute", "NLL", "level-10", "level-13"))

    def test_variants_are_fitted_separately(self, tmp_path: Path) -> None:
        table = pd.read_csv(self.runs(tmp_path / "a.csv"))
        sparse = table.assign(nll=table["nll"] + 0.5, variant="sp-kv")
        path = tmp_path / "ladders.csv"
        pd.concat([table.assign(variant="dense"), sparse]).sample(frac=1, random_state=0).to_csv(
            path, index=False
        )
        runs = read_runs(path)
        laws = fit_runs(runs)
        assert set(laws) == {"dense", "sp-kv"}
        gap = laws["sp-kv"].irreducible.value - laws["dense"].irreducible.value
        assert gap == pytest.approx(0.5, abs=1e-6)
        legend = draw(scaling_chart(runs, laws)).axes[0].get_legend()
        assert legend is not None
        entries = sorted(text.get_text().split(":")[0] for text in legend.get_texts())
        assert entries == ["95% interval of one run", "dense", "sp-kv"]

    def test_missing_names_blank_lines_and_unknown_columns(self, tmp_path: Path) -> None:
        """Runs are named after their rows, blank lines count as lines, and unknown columns are ignored."""
        path = tmp_path / "runs.csv"
        path.write_text("nll,gpu,train_flops\n\n2.5,a,1e19\n3.0,b,1e18\n")
        runs = read_runs(path)
        assert runs.to_dict("list") == {
            "name": ["2", "1"],
            "variant": ["", ""],
            "train_flops": [1e18, 1e19],
            "nll": [3.0, 2.5],
            "held_out": [False, False],
        }
        assert (runs["held_out"].dtype, runs["nll"].dtype) == (np.bool_, np.float64)

    def test_a_ragged_line_is_an_error(self, tmp_path: Path) -> None:
        """A line shorter or longer than the header is refused."""
        path = tmp_path / "runs.csv"
        path.write_text("name,train_flops,nll\na,1e18,3.0,0\nb,1e19,2.7,0\n")
        with pytest.raises(UserError, match=r"runs\.csv, line 2: 4 values for 3 columns"):
            read_runs(path)

    def test_four_runs_are_enough(self, tmp_path: Path) -> None:
        """With one degree of freedom, three points of an exact law predict the fourth."""
        path = self.runs(tmp_path / "four.csv", held_out=[0, 0, 0, 0, 1])
        main(["reproduce", "scaling", str(path), "--workspace", str(tmp_path)])
        law = yaml.safe_load((tmp_path / "reports" / "four" / "scaling.yaml").read_text())["fits"][
            0
        ]
        assert law["num_runs"] == 4

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"nll": None}, "column 'nll' is missing; a table has train_flops, nll, this one"),
            (
                {"train_flops": None, "nll": None, "loss": [1.0]},
                "column 'train_flops' is missing",
            ),
            (
                {"held_out": [0, 0, 0, 1, 1]},
                "3 different amounts of compute; a law of three parameters needs at least 4",
            ),
            ({"train_flops": [1e18, 1e18, 1e19, 1e19, 1e20]}, "3 different amounts of compute"),
            ({"variant": ["a", "a", "a", "a", "b"]}, "variant 'b': 1 different amounts of compute"),
            (
                {"nll": [3.0, 2.7, float("nan"), 2.4, 2.3]},
                "line 4: column 'nll' must be a number above 0; found ''",
            ),
            (
                {"nll": [3.0, 2.7, "inf", 2.4, 2.3]},
                "line 4: column 'nll' must be a number above 0; found 'inf'",
            ),
            (
                {"nll": [3.0, 2.7, "x", 2.4, 2.3]},
                "line 4: column 'nll' must be a number above 0; found 'x'",
            ),
            (
                {"train_flops": [-1e18, 1e19, 1e20, 1e21, 1e22]},
                "line 2: column 'train_flops' must be a number above 0",
            ),
            (
                {"held_out": [0, 0, 0, 0, "yes"]},
                "line 6: column 'held_out' must be 0 or 1; found 'yes'",
            ),
            ({"nll": [2.0, 2.1, 2.2, 2.3, 2.4]}, "does not fall"),
        ],
    )
    def test_bad_runs(
        self,
        columns: dict[str, Any],
        message: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        base = {} if columns.get("loss") is None else {"train_flops": None}
        path = self.runs(tmp_path / "runs.csv", **{**base, **columns})
        assert message in fails(capsys, "reproduce", "scaling", path, "--workspace", tmp_path / "w")
        assert not (tmp_path / "w").exists()

    def test_no_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "runs not found" in fails(
            capsys, "reproduce", "scaling", tmp_path / "none.csv", "--workspace", tmp_path
        )
        (tmp_path / "empty.csv").write_text("")
        assert "the file is empty" in fails(
            capsys, "reproduce", "scaling", tmp_path / "empty.csv", "--workspace", tmp_path
        )


def test_the_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "ladder", "--density", "0.2", "--workspace", str(tmp_path)])
    output = capsys.readouterr().out
    assert all(f" {number} " in output for number in ("10.57", "2.114", "12.68", "4.22"))
    folder = tmp_path / "reports" / "paper"
    assert {p.name for p in folder.iterdir()} == {
        "flops.csv",
        "flops.png",
        "flops.svg",
        "flops.pdf",
    }
    rows = pd.read_csv(folder / "flops.csv").set_index("name")
    assert len(rows) == 13
    assert (rows["attention_dense"] / rows["attention_sparse"]).tolist() == pytest.approx(
        [5.0] * 13, rel=1e-4
    )
    assert rows.loc["llama-3-8b", "total_dense"] == pytest.approx(
        2 * 6.98e9 + 2 * 32 * 4096 * 131072, rel=1e-3
    )
