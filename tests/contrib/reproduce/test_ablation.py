"""Test ablations: rows of overrides on one recipe, all checked before the first is trained."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from helpers import fails

from spkv_nas.artifacts.layout import Layout
from spkv_nas.cli import main
from spkv_nas.contrib.reproduce.ablate.stage import COLUMNS
from spkv_nas.training import trainer

ROWS = """\
name: tiny-ablations
recipe: recipe.yaml
rows:
  baseline: {}
  window 4: {gates: {window: 4}}
  soft to the end: {gates: {soft_fraction: 1.0}}
  local: {layout: local.yaml}
  full: {variant: full-attention}
  as it is: {variant: full-attention, trained: false}
  local, as it is: {layout: local.yaml, trained: false}
"""


@pytest.fixture
def file(recipe_file: Path) -> Path:
    Layout(("LL", "GL"), 8).write(recipe_file.parent / "local.yaml")
    path = recipe_file.parent / "ablations.yaml"
    path.write_text(ROWS)
    return path


@pytest.mark.slow
def test_table(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / "w"
    arguments = ["reproduce", "ablate", str(file), "--workspace", str(workspace), "--device", "cpu"]
    main(arguments)
    output = capsys.readouterr().out
    rows = pd.read_csv(workspace / "reports" / "tiny-ablations" / "ablations.csv").set_index("name")
    assert (rows.index.name, *rows.columns) == COLUMNS
    assert list(rows.index) == [
        *("baseline", "window 4", "soft to the end", "local", "full"),
        *("as it is", "local, as it is"),
    ]
    assert rows.loc["baseline", ["delta_density_percent", "delta_nll_percent"]].tolist() == [
        0.0,
        0.0,
    ]
    assert rows.loc[["local", "full"], "density_percent"].tolist() == [25.0, 100.0]
    untrained = rows.loc[["as it is", "local, as it is"]]
    assert untrained["density_percent"].tolist() == [100.0, 25.0]
    assert untrained["steps"].tolist() == [0, 0]
    base = rows.loc["baseline"]
    expected = 100 * (rows["density_percent"] / base["density_percent"] - 1)
    assert rows["delta_density_percent"].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    expected = 100 * (rows["nll"] / base["nll"] - 1)
    assert rows["delta_nll_percent"].tolist() == pytest.approx(expected.tolist(), abs=2e-3)
    assert (
        rows.loc[["window 4", "local", "full", "as it is", "local, as it is"], "nll"].nunique() == 5
    )
    assert (untrained["nll"] > rows["nll"].iloc[:5].max()).all()
    assert "window 4" in output
    assert "relative to the first row" in " ".join(output.split())
    assert (workspace / "reports" / "tiny-ablations" / "ablations.yaml").is_file()
    monkeypatch.setattr(trainer.SPKVTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    main(arguments)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "window: 4",
            "windw: 4",
            "row 'window 4': unknown key 'gates.windw'; did you mean 'window'?",
        ),
        ("{variant: full-attention}", "{variant: dense}", "variant"),
        ("soft_fraction: 1.0", "soft_fraction: 3", "row 'soft to the end'"),
        ("local.yaml", "nowhere.yaml", "layout not found"),
        ("baseline: {}", "baseline: {trained: false}", "'rows.baseline': gates are trained"),
        ("name: tiny-ablations\n", "", "name"),
    ],
)
def test_bad_input_is_found_before_training(
    old: str, new: str, message: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(ROWS.replace(old, new))
    assert message in fails(capsys, "reproduce", "ablate", file, "--workspace", tmp_path / "w")
    assert not (tmp_path / "w" / "runs").exists()
