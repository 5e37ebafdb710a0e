"""Test tables of every kind and age: files of earlier versions are read, and written with their kind and unit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from paths import ROOT

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_yaml

COMMITTED = ROOT / "probes"


@pytest.mark.parametrize(
    ("name", "kind", "unit", "column"),
    [
        ("stdlib-21x3", "density", "share of tokens kept", "density"),
        ("stdlib-21x3-head-gates", "share", "share in [0, 1]", "score"),
    ],
)
def test_earlier_tables_keep_their_values(name: str, kind: str, unit: str, column: str, tmp_path: Path) -> None:
    """Tables with the column ``density`` and no kind read with the same values."""
    old = (COMMITTED / name / "density.csv").read_text().replace(f",{column},", ",density,", 1)
    earlier = read_yaml(COMMITTED / name / "probe.yaml", "probe")
    for key in ("sha256", "kind", "unit"):
        del earlier[key]
    for statistic in ("mean", "std"):
        earlier[f"{statistic}_density"] = earlier.pop(f"{statistic}_{kind}")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "density.csv").write_text(old)
    (tmp_path / "old" / "probe.yaml").write_text(yaml.safe_dump(earlier))
    table = HeadScores.read(tmp_path / "old")
    assert (table.kind, table.measure.unit) == (kind, unit)
    table.write(tmp_path / "new")
    assert (tmp_path / "new" / "density.csv").read_text() == old.replace("density", column, 1)
    record = read_yaml(tmp_path / "new" / "probe.yaml", "probe")
    assert (record["kind"], record["unit"]) == (kind, unit)
    assert {key for key in record if key.startswith(("mean_", "std_"))} == {f"mean_{kind}", f"std_{kind}"}
    again = HeadScores.read(tmp_path / "new")
    assert (again.kind, again.signal, again.content_hash) == (kind, table.signal, table.content_hash)
    assert np.array_equal(again.values, table.values)


def test_the_hash_of_a_probe_is_that_in_older_layouts() -> None:
    origin = read_yaml(ROOT / "layouts" / "stdlib-21x3" / "densest.yaml", "layout")["provenance"]
    assert HeadScores.read(COMMITTED / "stdlib-21x3").content_hash == origin["probe_hash"]


def made(folder: Path, column: str, record: str = "", value: float = 0.5) -> Path:
    (folder / "density.csv").write_text(f"layer,kv_head,{column}\n0,0,{value}\n0,1,0.25\n")
    if record:
        (folder / "probe.yaml").write_text(record)
    return folder


def test_tables_made_by_hand(tmp_path: Path) -> None:
    assert HeadScores.read(made(tmp_path, "density")).is_density
    table = HeadScores.read(made(tmp_path, "score", value=-7.5))
    assert (table.kind, table.is_density, table.values.tolist()) == ("score", False, [[-7.5, 0.25]])
    assert table.measure.noun == "custom score"


@pytest.mark.parametrize("column", ["score", "density"])
@pytest.mark.parametrize(
    ("record", "kind", "noun", "unit"),
    [
        ("signal: opening\nunit: nats per token\n", "gain", "opening gain", "nats per token"),
        ("signal: duo\n", "share", "duo score", "share in [0, 1]"),
        ("signal: nobody\nkind: score\nunit: metres\n", "score", "nobody score", "metres"),
        ("signal: nobody\nkind: gain\nunit: bits\n", "gain", "nobody gain", "bits"),
    ],
)
def test_record_states_kind_and_unit(column: str, record: str, kind: str, noun: str, unit: str, tmp_path: Path) -> None:
    """Old and new column names are read, also of signals that are not installed."""
    table = HeadScores.read(made(tmp_path, column, record))
    assert (table.kind, table.measure.noun, table.measure.unit) == (kind, noun, unit)
    assert table.values.tolist() == [[0.5, 0.25]]


@pytest.mark.parametrize(
    ("column", "record", "value", "message"),
    [
        ("score", "signal: density\n", 0.5, "column 'density' is missing"),
        ("density", "", -0.5, r"column 'density' must be a number in \[0, 1\]"),
        ("score", "signal: duo\n", 1.5, r"column 'score' must be a number in \[0, 1\]"),
        ("score", "signal: a\nkind: gain\n", 1e4, r"column 'score' must be a number in \[-1000, 1000\]"),
        ("score", "signal: a\nkind: score\n", 1e10, r"column 'score' must be a number in \[-1e\+09, 1e\+09\]"),
        ("score", "signal: a\nkind: weight\n", 0.5, "kind"),
    ],
)
def test_damaged_tables(column: str, record: str, value: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        HeadScores.read(made(tmp_path, column, record, value))
