"""Test tables of every kind: they are read and written with their kind and unit."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_yaml

COMMITTED = ROOT / "probes"


@pytest.mark.parametrize(
    ("name", "kind", "unit", "column"),
    [
        ("stdlib-21x3", "density", "share of tokens kept", "density"),
        ("stdlib-21x3-head-gates", "share", "gate in [0, 1]", "score"),
    ],
)
def test_committed_tables_are_written_as_they_are(
    name: str, kind: str, unit: str, column: str, tmp_path: Path
) -> None:
    table = HeadScores.read(COMMITTED / name)
    assert (table.kind, table.measure.unit) == (kind, unit)
    table.write(tmp_path)
    rows = (tmp_path / "density.csv").read_text()
    assert rows == (COMMITTED / name / "density.csv").read_text()
    assert rows.startswith(f"layer,kv_head,{column},")
    # The keys of the record may be in another order, which changes its own hash alone
    written = read_yaml(tmp_path / "probe.yaml", "probe")
    committed = read_yaml(COMMITTED / name / "probe.yaml", "probe")
    for record in (written, committed):
        del record["sha256"]["probe.yaml"]
    assert written == committed
    assert HeadScores.read(tmp_path).content_hash == table.content_hash


def test_the_hash_of_a_probe_is_that_in_its_layouts() -> None:
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


@pytest.mark.parametrize(
    ("record", "kind", "noun", "unit"),
    [
        (
            "signal: add-one-head\nkind: gain\nunit: nats per token\n",
            "gain",
            "add-one-head gain",
            "nats per token",
        ),
        ("signal: duo\nkind: share\n", "share", "duo score", "share in [0, 1]"),
        ("signal: nobody\nkind: score\nunit: metres\n", "score", "nobody score", "metres"),
        ("signal: nobody\nkind: gain\nunit: bits\n", "gain", "nobody gain", "bits"),
    ],
)
def test_record_states_kind_and_unit(
    record: str, kind: str, noun: str, unit: str, tmp_path: Path
) -> None:
    """Also of signals that are not installed."""
    table = HeadScores.read(made(tmp_path, "score", record))
    assert (table.kind, table.measure.noun, table.measure.unit) == (kind, noun, unit)
    assert table.values.tolist() == [[0.5, 0.25]]


@pytest.mark.parametrize(
    ("column", "record", "value", "message"),
    [
        ("score", "signal: density\nkind: density\n", 0.5, "column 'density' is missing"),
        ("density", "signal: duo\nkind: share\n", 0.5, "column 'score' is missing"),
        ("density", "", -0.5, r"column 'density' must be a number in \[0, 1\]"),
        (
            "score",
            "signal: duo\nkind: share\n",
            1.5,
            r"column 'score' must be a number in \[0, 1\]",
        ),
        (
            "score",
            "signal: a\nkind: gain\n",
            1e4,
            r"column 'score' must be a number in \[-1000, 1000\]",
        ),
        (
            "score",
            "signal: a\nkind: score\n",
            1e10,
            r"column 'score' must be a number in \[-1e\+09, 1e\+09\]",
        ),
        ("score", "signal: a\nkind: weight\n", 0.5, "kind"),
    ],
)
def test_damaged_tables(
    column: str, record: str, value: float, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        HeadScores.read(made(tmp_path, column, record, value))
