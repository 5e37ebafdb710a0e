"""Test tables of head scores: means, thresholds from the histogram, files, and errors of CSV files written by hand."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from paths import ROOT

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.histogram import LogitHistogram
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base.arrays import read_npz
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_npz

HEADER = "layer,kv_head,density"


def rows(
    density: object, domain: str = "all", num_tokens: int = 1, standard_error: float = math.nan
) -> pd.DataFrame:
    """Return one row per entry of ``density`` [L, Hkv]."""
    grid = np.asarray(density, dtype=float)
    layer, head = (axis.ravel() for axis in np.indices(grid.shape))
    return pd.DataFrame({"layer": layer, "kv_head": head, "score": grid.ravel()}).assign(
        domain=domain, num_tokens=num_tokens, num_documents=2, standard_error=standard_error
    )


def probed(seed: int = 0) -> tuple[HeadScores, np.ndarray]:
    """Return a table of 2 domains, 2 layers, 3 heads with its histogram, and the logits [domain, L, Hkv, token]."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(generator.normal(0, 2, (2, 2, 3, 1)), 1.0, (2, 2, 3, 400))
    edges = np.linspace(-8, 8, 161)
    bins = np.searchsorted(edges, logits, side="right")
    counts = np.stack([(bins == i).sum(-1) for i in range(len(edges) + 1)], axis=-1)
    parts = [
        rows((logits[i] >= 0).mean(-1), name, 400, 0.01) for i, name in enumerate(("code", "docs"))
    ]
    positions = pd.DataFrame(
        {
            "layer": [0],
            "kv_head": [0],
            "start": [0],
            "end": [8],
            "density": [0.25],
            "num_tokens": [8],
        }
    )
    table = HeadScores(
        "p",
        pd.concat(parts, ignore_index=True),
        window=32,
        positions=positions,
        histogram=LogitHistogram(edges, counts, ("code", "docs")),
        record=ProbeRecord.of({"seed": 7, "shape": {"layers": 2}}),
    )
    return table, logits


def test_domains_are_weighted_by_their_tokens() -> None:
    parts = [rows([[0.2, 0.4]], "code", 300, 0.03), rows([[0.6, 0.8]], "docs", 100, 0.04)]
    table = HeadScores("p", pd.concat(parts, ignore_index=True))
    np.testing.assert_allclose(table.density, [[0.3, 0.5]])
    np.testing.assert_allclose(table.standard_error, math.hypot(0.75 * 0.03, 0.25 * 0.04))
    np.testing.assert_allclose(table.domain_density("docs"), [[0.6, 0.8]])
    assert table.domains == ("code", "docs")
    assert (table.num_layers, table.num_kv_heads, table.num_heads) == (1, 2, 2)
    assert (
        repr(table)
        == "HeadScores('p', 1 layers x 2 KV heads, signal density, kind density, unit share of tokens kept)"
    )
    assert table.mean == pytest.approx(0.4)
    assert table.std == pytest.approx(0.1)


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.8])
def test_density_at_a_threshold_matches_a_count_of_the_utilities(tau: float) -> None:
    table, logits = probed()
    actual = table.at_tau(tau)
    expected = (1 / (1 + np.exp(-logits)) >= tau).mean(axis=(0, 3))
    np.testing.assert_allclose(actual.density, expected, atol=0.02)  # linear within a bin of 0.1
    assert actual.tau == tau


def test_extreme_thresholds() -> None:
    table, _ = probed()
    assert table.at_tau(0.0).mean == 1.0
    assert table.at_tau(1.0).mean == 0.0
    assert table.at_tau(table.tau) is table


def test_values_at_one_threshold_are_not_used_at_another(tmp_path: Path) -> None:
    table = probed()[0].at_tau(0.7)
    assert np.isnan(table.standard_error).all()
    assert (table.tau, table.tau_of_positions, table.at_tau(0.9).tau_of_positions) == (
        0.7,
        0.5,
        0.5,
    )
    table.write(tmp_path)
    assert not (tmp_path / "positions.csv").exists()


@pytest.mark.parametrize("rho", [0.0, 0.1, 0.286, 0.5, 0.9, 1.0])
def test_threshold_for_a_density(rho: float) -> None:
    table, _ = probed()
    assert table.at_tau(table.tau_for_density(rho)).mean == pytest.approx(rho, abs=1e-3)


@pytest.mark.parametrize("tau", [-0.1, 1.1, math.nan])
def test_threshold_out_of_range(tau: float) -> None:
    with pytest.raises(UserError, match="tau"):
        probed()[0].at_tau(tau)


def test_table_without_histogram_has_one_threshold() -> None:
    table = HeadScores("mine", rows([[0.5]]))
    with pytest.raises(UserError, match="mine"):
        table.at_tau(0.7)
    with pytest.raises(UserError, match="mine"):
        table.tau_for_density(0.3)


@pytest.mark.parametrize(
    ("density", "words"), [(0.99, ("100%", "nearly everything")), (0.01, ("nearly nothing",))]
)
def test_diagnosis_of_gates_that_have_not_differentiated(
    density: float, words: tuple[str, ...]
) -> None:
    (sentence,) = HeadScores("p", rows(np.full((4, 3), density))).diagnosis()
    assert all(word in sentence for word in words)
    assert "steps" in sentence
    assert "learning rate" in sentence


def test_diagnosis_warns_of_mostly_open_gates() -> None:
    """Warn where most but not all heads are open, as after a short branch."""
    density = np.where(np.arange(12) < 8, 0.99, 0.88).reshape(4, 3)
    (sentence,) = HeadScores("p", rows(density)).diagnosis()
    assert "67%" in sentence


def test_diagnosis_of_differentiated_gates_is_empty() -> None:
    assert HeadScores("p", rows(np.linspace(0, 1, 12).reshape(4, 3))).diagnosis() == []
    target = np.zeros((4, 3))
    target[2] = 1.0  # what gates with a target density of a fourth come to at best
    assert HeadScores("p", rows(target)).diagnosis() == []


def test_round_trip(tmp_path: Path) -> None:
    table, _ = probed()
    table.write(tmp_path / "p")
    result = HeadScores.read(tmp_path / "p")
    np.testing.assert_allclose(result.density, table.density, rtol=1e-5)
    np.testing.assert_allclose(result.standard_error, table.standard_error, rtol=1e-5)
    assert (result.name, result.tau, result.window, result.domains) == (
        "p",
        0.5,
        32,
        ("code", "docs"),
    )
    assert result.record.entries()["seed"] == 7
    assert result.histogram is not None
    assert table.histogram is not None
    np.testing.assert_array_equal(result.histogram.counts, table.histogram.counts)
    np.testing.assert_allclose(result.at_tau(0.7).density, table.at_tau(0.7).density)
    assert result.positions is not None
    assert result.positions.to_dict("list") == table.positions.to_dict("list")  # type: ignore[union-attr]
    assert HeadScores.read(tmp_path / "p" / "density.csv").window == 32


def test_written_table_starts_with_the_documented_columns(tmp_path: Path) -> None:
    probed()[0].write(tmp_path)
    header = (tmp_path / "density.csv").read_text().splitlines()[0]
    assert header.startswith("layer,kv_head,density,domain,num_tokens,num_documents")


def test_table_made_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"\ufeff{HEADER}\n1,0,0.5\n0,0,0.25\n")  # Excel puts a mark before the header
    table = HeadScores.read(path)
    assert (table.name, table.domains, table.tau, table.window) == ("mine", ("all",), 0.5, None)
    np.testing.assert_array_equal(table.density, [[0.25], [0.5]])
    assert np.isnan(table.standard_error).all()


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", []),
        (f"{HEADER}\n", []),
        ("layer,density\n0,0.5\n", ["kv_head", "missing"]),
        (f"{HEADER}\n0,0,0.5\n0,1,nan\n", ["line 3", "density"]),
        (f"{HEADER}\n0,0,x\n", ["line 2", "'x'"]),
        (f"{HEADER}\n0,0,\n", ["line 2", "density"]),
        (f"{HEADER}\n0,0,1.01\n", ["line 2", "1.01"]),
        (f"{HEADER}\n0,0,-0.1\n", ["line 2", "-0.1"]),
        (f"{HEADER}\n0.5,0,0.1\n", ["line 2", "layer"]),
        (f"{HEADER}\n-1,0,0.1\n", ["line 2", "layer"]),
        (f"{HEADER}\n0,0,0.1\n0,0,0.2\n", ["line 3", "twice"]),
        (f"{HEADER}\n0,0,0.1\n1,1,0.2\n", ["missing", "layer 0, KV head 1"]),
        (f"{HEADER}\n1,0,0.1\n", ["missing", "layer 0, KV head 0"]),
        (f"{HEADER},domain\n0,0,0.1,a\n1,0,0.1,a\n0,0,0.1,b\n", ["missing", "'b'"]),
        (f"{HEADER},standard_error\n0,0,0.1,-1\n", ["line 2", "standard_error"]),
    ],
)
def test_mistakes_in_a_table_are_explained(tmp_path: Path, text: str, messages: list[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        HeadScores.read(path)
    assert all(message in str(error.value) for message in ["mine.csv", *messages])


def test_missing_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        HeadScores.read(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            f"{HEADER}\n0,0,0.5\n3000000000,0,0.5\n",
            ["missing", "layer 1, KV head 0"],
        ),  # listed every hole: never ended
        (f"{HEADER}\n\n0,0,0.5\n\n0,1,x\n", ["line 5"]),
        (f"{HEADER}\n0,0,0.5,1\n1,0,0.5,1\n", ["line 2", "4 values for 3 columns"]),
        (f"{HEADER},num_token\n0,0,0.5,9\n", ["unknown", "'num_token'"]),
        (f"{HEADER},num_tokens\n0,0,0.5,0\n", ["line 2", "num_tokens"]),
    ],
)
def test_mistakes_that_once_hung_or_passed(tmp_path: Path, text: str, messages: list[str]) -> None:
    test_mistakes_in_a_table_are_explained(tmp_path, text, messages)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("histogram.npz", "junk"),
        ("histogram.npz", ""),
        ("positions.csv", ""),
        ("positions.csv", "layer,kv_head\n0,0\n"),
        ("probe.yaml", "tau: abc\n"),
        ("probe.yaml", "tau: 7\n"),
        ("probe.yaml", "window: -3\n"),
    ],
)
def test_damaged_file_beside_the_table_is_named(tmp_path: Path, name: str, content: str) -> None:
    probed()[0].write(tmp_path)
    (tmp_path / name).write_text(content)
    with warnings.catch_warnings():
        # A table that has changed is also warned about
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(UserError, match=name):
            HeadScores.read(tmp_path)


def test_damaged_arrays_are_refused(tmp_path: Path) -> None:
    """A flipped byte anywhere in the archive is a user error."""
    path = tmp_path / "histogram.npz"
    write_npz(path, {"edges": np.arange(1000.0), "counts": np.ones(3, dtype=np.int64)})
    sound = path.read_bytes()
    generator = np.random.default_rng(0)
    messages = []
    for _ in range(300):
        content = bytearray(sound)
        content[generator.integers(len(content))] ^= int(generator.integers(1, 256))
        path.write_bytes(content)
        try:
            read_npz(path, ("edges", "counts"), "probe again")
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 200
    assert all(
        "histogram.npz is damaged: " in text and text.endswith("\nprobe again") for text in messages
    )
    path.write_bytes(sound)
    assert read_npz(path, ("counts",), "")["counts"].tolist() == [1, 1, 1]
    with pytest.raises(UserError, match="bins"):
        read_npz(path, ("bins",), "")
    write_npz(path, {"edges": np.zeros(1000)}, compressed=False)
    assert path.stat().st_size > 8000


def test_columns_keep_their_types(tmp_path: Path) -> None:
    probed()[0].write(tmp_path)
    result = HeadScores.read(tmp_path)
    (tmp_path / "mine.csv").write_text(f"{HEADER}\n0,0,1\n")
    for frame in (result.rows, HeadScores.read(tmp_path / "mine.csv").rows):
        types = {name: str(kind) for name, kind in frame.dtypes.items()}
        assert types.pop("domain") in ("str", "object")  # by the version of pandas
        assert types == {
            "layer": "int64",
            "kv_head": "int64",
            "score": "float64",
            "num_tokens": "int64",
            "num_documents": "int64",
            "standard_error": "float64",
        }
        assert isinstance(frame.index, pd.RangeIndex)
    assert result.positions is not None
    assert [str(kind) for kind in result.positions.dtypes] == ["int64"] * 4 + ["float64", "int64"]


def test_metadata_with_one_value_under_two_keys(tmp_path: Path) -> None:
    """YAML must not write the second as an alias, which the strict reader refuses."""
    shared = {"layers": 2}
    HeadScores(
        "p", rows([[0.5]]), record=ProbeRecord.of({"shape": shared, "recipe": {"model": shared}})
    ).write(tmp_path)
    assert HeadScores.read(tmp_path).record.entries()["recipe"] == {"model": shared}


def test_writing_removes_files_of_an_earlier_probe(tmp_path: Path) -> None:
    probed()[0].write(tmp_path)
    HeadScores("p", rows([[0.5]])).write(tmp_path)
    result = HeadScores.read(tmp_path)
    assert result.histogram is None
    assert result.positions is None


def test_unknown_domain() -> None:
    with pytest.raises(UserError, match="no domain 'zzz'; it has code, docs"):
        probed()[0].domain_density("zzz")


@pytest.mark.parametrize("rho", [-0.1, 2.0, math.nan])
def test_density_to_match_out_of_range(rho: float) -> None:
    with pytest.raises(UserError, match="density to match"):
        probed()[0].tau_for_density(rho)


def test_a_table_of_densities_is_called_that() -> None:
    assert HeadScores.read(ROOT / "probes" / "stdlib-21x3").signal == "density"
