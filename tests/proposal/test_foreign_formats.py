"""Test the formats of DuoAttention and PruLong, and the commands that show, compare and convert layouts.

The files are made in the form in which both projects write them (``numpy.savetxt``, ``csv.writer``).
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from numpy.typing import NDArray
from paths import ROOT, copy_example

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.proposal import foreign_formats
from spkv_nas.proposal.foreign_formats import (
    ForeignScores,
    convert,
    num_local,
    read_score_table,
    read_scores,
)
from spkv_nas.proposal.propose import propose

COMMITTED = ROOT / "layouts" / "stdlib-21x3"
# The first two layers have a value that training left below 0 and ties at 1, as published files do.
ALPHA = np.array([[-2.4e-4, 0.62, 1.0], [1.0, 0.11, 0.34], [0.97, 1.0, 0.5], [0.2, 0.81, 0.03]])
MASK = (ALPHA > 0.5).astype(float)
CONFIG = {
    "model_name": "m",
    "lr": 0.02,
    "sink_size": 128,
    "recent_size": 256,
    "threshold": 0.5,
    "sparsity": None,
}


@pytest.fixture
def duo(tmp_path: Path) -> Path:
    """Folder in DuoAttention's format."""
    folder = tmp_path / "lr=0.02-reg=0.05"
    folder.mkdir()
    np.savetxt(folder / "full_attention_heads.tsv", ALPHA, delimiter="\t")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def prulong(tmp_path: Path) -> Path:
    """PruLong mask in the folder of its checkpoint."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with (folder / "masks.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows(MASK.tolist())
    sizes = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 3,
        "num_attention_heads": 6,
        "rope_scaling": None,
    }
    (folder / "config.json").write_text(
        json.dumps({**sizes, "sink_size": 128, "local_window_size": 1024})
    )
    return folder / "masks.tsv"


def as_duo_attention_reads(folder: Path) -> tuple[NDArray[np.float64], int, int]:
    """Return alpha, sinks and window, by the calls of DuoAttention's loader."""
    config = json.loads((folder / "config.json").read_text())
    alpha = np.loadtxt(folder / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    return np.clip(alpha, 0, 1), config["sink_size"], config["recent_size"]


class TestReading:
    def test_duo_attention(self, duo: Path) -> None:
        for path in (duo, duo / "full_attention_heads.tsv"):
            scores = read_scores(path)
            assert np.array_equal(scores.values, np.clip(ALPHA, 0, 1))
            assert (scores.origin, scores.window, scores.sink_size) == ("duo-attention", 256, 128)
            assert not scores.is_mask

    def test_prulong(self, prulong: Path) -> None:
        scores = read_scores(prulong)
        assert np.array_equal(scores.values, MASK)
        assert (scores.origin, scores.window, scores.sink_size) == ("prulong", 1024, 128)
        assert scores.is_mask
        (prulong.parent / "config.json").unlink()
        bare = read_scores(prulong)
        assert (bare.origin, bare.window, bare.sink_size) == ("prulong", None, None)

    def test_a_table_for_propose(self, duo: Path) -> None:
        table = read_score_table(duo / "full_attention_heads.tsv")
        assert (table.name, table.signal, table.window, table.sinks) == (
            duo.name,
            "duo-attention",
            256,
            128,
        )
        assert np.array_equal(table.density, np.clip(ALPHA, 0, 1))
        densest = propose(table, 3)["densest"]
        assert (densest.heads, densest.sinks) == (("LLG", "GLL", "LGL", "LLL"), 128)
        assert densest.provenance["signal"] == "duo-attention"
        assert densest.provenance["source"] == str(duo / "full_attention_heads.tsv")
        assert densest.provenance["tau"] is None

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "the file is empty"),
            (b"\n# a comment\n\n", "the file is empty"),
            (b"\x93NUMPY\x01\xff\xfe", "cannot read head scores"),
            (b"\x00\x01\x02", "it is UTF-16, UTF-32 or binary: save it as UTF-8"),
            (b"0.1\t0.2\n0.3\n", "line 2: expected 2 values, as in the first line; found 1"),
            (
                b"0.1\t0.2\n0.3\tmany\n",
                "line 2, column 2: expected tab-separated numbers in [0, 1]; found 'many'",
            ),
            (b"0.1 0.2\n", "found '0.1 0.2'"),
            (b"0.1\t\n", "column 2: expected tab-separated numbers in [0, 1]; found ''"),
            (b"0.1\tnan\n", "found 'nan'"),
            (b"0.1\tinf\n", "found 'inf'"),
            (b"0.1\t1.02\n", "found '1.02'"),
            (b"-3.5\t0.2\n", "found '-3.5'"),
            (b"format: spkv-nas/layout/1\n", "found 'format: spkv-nas/lay...'"),
        ],
    )
    def test_mistakes_are_explained(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "masks.tsv").write_bytes(content)
        with pytest.raises(UserError, match=re.escape(message)) as error:
            read_scores(tmp_path / "masks.tsv")
        assert "masks.tsv" in str(error.value)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("{", "is not valid JSON: Expecting property name"),
            ("[1]", "expected keys and values, found list"),
            ('{"recent_size": 0}', "'recent_size' must be a whole number of at least 1; found 0"),
            ('{"sink_size": true}', "'sink_size' must be a whole number of at least 0; found True"),
            (
                '{"num_key_value_heads": 8}',
                "4 layers x 3 KV heads, config.json in the same folder has 4 layers x 8",
            ),
            ('{"num_hidden_layers": 32, "num_key_value_heads": 3}', "has 32 layers x 3 KV heads"),
        ],
    )
    def test_configs_that_do_not_fit(self, prulong: Path, config: str, message: str) -> None:
        (prulong.parent / "config.json").write_text(config)
        with pytest.raises(UserError, match=re.escape(message)):
            read_scores(prulong)

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="head scores not found"):
            read_scores(tmp_path / "none.tsv")
        with pytest.raises(UserError, match="head scores not found"):
            read_scores(tmp_path)
        with pytest.raises(UserError, match=r"neither a layout \(\.yaml\)"):
            read_scores(tmp_path / "masks.npy")


class TestChoosing:
    @pytest.mark.parametrize("shape", [(1, 1), (3, 4), (21, 3), (32, 8)])
    def test_a_sparsity_is_their_quantile(self, shape: tuple[int, int]) -> None:
        values = (
            np.random.default_rng(0)
            .permutation(np.linspace(0.01, 0.99, shape[0] * shape[1]))
            .reshape(shape)
        )
        scores = ForeignScores(values, "duo-attention", "x")
        for sparsity in (1e-6, 0.1, 0.25, 0.29, 0.3, 0.5, 0.57, 0.7, 0.75, 0.9, 0.999):
            assert np.array_equal(
                scores.choose(sparsity=sparsity), values >= np.quantile(values, sparsity)
            ), sparsity
        assert scores.choose(sparsity=0.0).all()
        assert not scores.choose(sparsity=1.0).any()

    def test_equal_scores_go_to_the_earlier_head(self) -> None:
        """Both projects break ties at random; a mask at its sparsity, 0.7 of 256 heads, thereby gains one head."""
        assert num_local(0.7, 256) == 179
        assert 256 - int(256 * (1 - 0.7)) == 180
        scores = ForeignScores(np.ones((2, 2)), "prulong", "x")
        assert scores.choose(sparsity=0.5).tolist() == [[True, True], [False, False]]

    def test_threshold_and_budget(self) -> None:
        scores = ForeignScores(ALPHA, "duo-attention", "x")
        assert np.array_equal(scores.choose(threshold=0.5), ALPHA >= 0.5)
        assert scores.choose(budget=4).sum() == 4
        assert scores.choose(budget="25%").sum() == 3
        assert np.array_equal(ForeignScores(MASK, "prulong", "x").choose(), MASK == 1)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "give --budget N, --sparsity S or --threshold T"),
            ({"budget": 3, "sparsity": 0.5}, "give only one of --budget, --sparsity"),
            ({"sparsity": 1.5}, "--sparsity must lie in [0, 1]; found 1.5"),
            ({"threshold": float("nan")}, "--threshold must lie in [0, 1]; found nan"),
            ({"budget": 13}, "the model has 12"),
        ],
    )
    def test_options_that_make_no_sense(self, options: dict[str, float], message: str) -> None:
        with pytest.raises(UserError, match=re.escape(message)):
            ForeignScores(ALPHA, "duo-attention", "x").choose(**options)  # type: ignore[arg-type]


class TestConverting:
    def test_scores_to_a_layout(self, duo: Path, tmp_path: Path) -> None:
        lines = convert(duo, tmp_path / "mine.yaml", sparsity=0.5)
        layout = Layout.read(tmp_path / "mine.yaml")
        assert np.array_equal(layout.global_mask, np.clip(ALPHA, 0, 1) >= np.quantile(ALPHA, 0.5))
        assert (layout.window, layout.sinks, layout.strategy) == (256, 128, "duo-attention")
        assert {**layout.provenance, "created_by": ""} == {
            "source": str(duo),
            "sparsity": 0.5,
            "budget": 6,
            "created_by": "",
        }
        assert lines == [
            f"{tmp_path / 'mine.yaml'}: 6 of 12 KV heads global, window 256, 128 sink tokens, hash {layout.hash}"
        ]

    def test_a_cut_among_equal_scores_is_reported(self, duo: Path, tmp_path: Path) -> None:
        note = convert(duo, tmp_path / "a.yaml", budget=2)[0]
        assert note.startswith("3 heads are tied at a score of 1, and 2 of them are global")
        assert not convert(duo, tmp_path / "b.yaml", budget=3)[0].startswith("3 heads")

    @pytest.mark.parametrize("form", ["duo", "out.tsv", "duo/full_attention_heads.tsv"])
    def test_a_layout_round_trips(self, tmp_path: Path, form: str) -> None:
        lines = convert(COMMITTED / "densest.yaml", tmp_path / form)
        end = (
            "--duoattn_sliding 32 --duoattn_sink 1"
            if form == "out.tsv"
            else "1 sink token, window 32"
        )
        assert lines[-1].endswith(end)
        sizes = {"window": 32, "sinks": 1} if form == "out.tsv" else {}
        back = convert(tmp_path / form, tmp_path / "back.yaml", **sizes)  # type: ignore[arg-type]
        assert (
            Layout.read(tmp_path / "back.yaml").hash == Layout.read(COMMITTED / "densest.yaml").hash
        )
        assert not any(line.startswith("not carried") for line in back)

    @pytest.mark.parametrize("form", ["duo", "out.tsv"])
    def test_sinks_there_and_back(self, tmp_path: Path, form: str) -> None:
        """Layouts held no sink tokens, so the sinks of both projects were dropped."""
        source = Layout(("GL", "LL"), 32, "a", sinks=4)
        source.write(tmp_path / "a.yaml")
        end, sizes = "4 sink tokens, window 32", {}
        if form == "out.tsv":
            end, sizes = "--duoattn_sliding 32 --duoattn_sink 4", {"window": 32, "sinks": 4}
        assert convert(tmp_path / "a.yaml", tmp_path / form)[-1].endswith(end)
        convert(tmp_path / form, tmp_path / "back.yaml", **sizes)  # type: ignore[arg-type]
        assert Layout.read(tmp_path / "back.yaml").hash == source.hash
        convert(tmp_path / "a.yaml", tmp_path / "none.yaml", sinks=0)
        assert (
            Layout.read(tmp_path / "none.yaml").content_hash
            == Layout(("GL", "LL"), 32).content_hash
        )

    def test_duo_attention_reads_the_files(self, prulong: Path, tmp_path: Path) -> None:
        """Sizes and values are kept."""
        convert(prulong, tmp_path / "out")
        alpha, sinks, window = as_duo_attention_reads(tmp_path / "out")
        assert np.array_equal(alpha, MASK)
        assert (sinks, window) == (128, 1024)
        convert(COMMITTED / "densest.yaml", tmp_path / "ours", window=64)
        alpha, sinks, window = as_duo_attention_reads(tmp_path / "ours")
        assert np.array_equal(alpha, Layout.read(COMMITTED / "densest.yaml").global_mask)
        assert (sinks, window) == (1, 64)

    def test_scores_stay_scores_for_duo_attention_unless_cut(
        self, duo: Path, tmp_path: Path
    ) -> None:
        convert(duo, tmp_path / "same")
        convert(duo, tmp_path / "cut", threshold=0.5)
        assert np.array_equal(as_duo_attention_reads(tmp_path / "same")[0], np.clip(ALPHA, 0, 1))
        assert np.array_equal(as_duo_attention_reads(tmp_path / "cut")[0], ALPHA >= 0.5)

    def test_prulong_reads_the_files(self, duo: Path, tmp_path: Path) -> None:
        lines = convert(duo, tmp_path / "masks.tsv", threshold=0.5)
        assert lines[-1].endswith(
            "record window and sinks: evaluate with --duoattn_sliding 256 --duoattn_sink 128"
        )
        with (tmp_path / "masks.tsv").open() as file:
            rows = [[float(cell) for cell in row] for row in csv.reader(file, delimiter="\t")]
        assert np.array_equal(rows, ALPHA >= 0.5)

    def test_densities_for_duo_attention(self, tmp_path: Path) -> None:
        table = tmp_path / "mine.csv"
        table.write_text("layer,kv_head,density\n0,0,0.25\n0,1,0.75\n")
        lines = convert(table, tmp_path / "out")
        assert "assumed a window of 128 (change it with --window W)" in lines[0]
        assert "sink tokens" not in lines[0]
        assert as_duo_attention_reads(tmp_path / "out")[0].tolist() == [0.25, 0.75]

    def test_sizes_that_no_file_contains(self, prulong: Path, tmp_path: Path) -> None:
        (prulong.parent / "config.json").unlink()
        line = convert(prulong, tmp_path / "a.yaml")[0]
        assert line.endswith(
            "sizes: assumed a window of 128 (change it with --window W) and no sink tokens (change it with --sinks N)"
        )
        convert(prulong, tmp_path / "b.yaml", window=7)
        assert Layout.read(tmp_path / "b.yaml").window == 7
        # Nothing is assumed
        assert len(convert(prulong, tmp_path / "c.yaml", window=7, sinks=4)) == 1
        assert Layout.read(tmp_path / "c.yaml").sinks == 4

    def test_mistakes(self, duo: Path, tmp_path: Path) -> None:
        config = (duo / "config.json").read_bytes()
        ours = COMMITTED / "densest.yaml"
        for source, target, options, message in [
            (
                ours,
                tmp_path / "x.yaml",
                {"budget": 3},
                "already chosen: --budget applies only to scores",
            ),
            (duo, tmp_path / "x.yaml", {}, "the global heads are not chosen yet"),
            (duo, tmp_path / "x.tsv", {}, "the global heads are not chosen yet"),
            (duo, tmp_path / "x.json", {"budget": 3}, "x.json: unknown output format"),
            (ours, duo, {}, "full_attention_heads.tsv already exists: choose another name"),
            (ours, duo / "full_attention_heads.tsv", {}, "already exists: choose another name"),
            (ours, tmp_path / "x.yaml", {"window": 0}, "--window is 0"),
        ]:
            with pytest.raises(UserError, match=re.escape(message)):
                convert(source, target, **options)  # type: ignore[arg-type]
        assert sorted(p.name for p in tmp_path.iterdir()) == [duo.name]
        (duo / "full_attention_heads.tsv").unlink()
        with pytest.raises(UserError, match=r"config\.json already exists"):
            convert(ours, duo)
        assert (duo / "config.json").read_bytes() == config

    @pytest.mark.parametrize(
        ("name", "message"),
        [("config.json", "already exists"), ("notes.txt", "was written by another process")],
    )
    def test_a_folder_that_appears_meanwhile_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
    ) -> None:
        """It was replaced, with everything in it."""
        target = tmp_path / "duo"
        write_json = foreign_formats.files.write_json

        def write_while_another_does(path: Path, content: Any) -> None:
            target.mkdir()
            (target / name).write_text("kept")
            write_json(path, content)

        monkeypatch.setattr(foreign_formats.files, "write_json", write_while_another_does)
        with pytest.raises(UserError, match=message):
            convert(COMMITTED / "densest.yaml", target)
        assert [file.name for file in tmp_path.iterdir()] == ["duo"]
        assert [file.name for file in target.iterdir()] == [name]
        assert (target / name).read_text() == "kept"


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and error (lines joined)."""
    code = 0
    try:
        main([str(a) for a in arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    output, error = capsys.readouterr()
    assert "Traceback" not in error
    return code, output, " ".join(error.split())


class TestCommands:
    def test_show(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        a, b = Layout(("GL", "LL", "GG"), 8, "mine"), Layout(("LL",), 8)
        a.write(tmp_path / "a.yaml")
        b.write(tmp_path / "b.yaml")
        code, output, _ = run(capsys, "layout", "show", tmp_path / "a.yaml", tmp_path / "b.yaml")
        assert code == 0
        assert output.splitlines() == [
            f"{tmp_path / 'a.yaml'}: 3 layers x 2 KV heads, 3 of 6 global (50.0 %), window 8, hash {a.hash}",
            "   0  GL  1",
            "   1  LL  0",
            "   2  GG  2",
            f"{tmp_path / 'b.yaml'}: 1 layers x 2 KV heads, 0 of 2 global (0.0 %), window 8, hash {b.hash}",
            "   0  LL  0",
        ]

    def test_show_with_coverage(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Coverage at the proposal's threshold equals that of the layout's provenance."""
        copy_example(tmp_path, "probes")
        options = ("--probe", "stdlib-21x3", "--workspace", tmp_path)
        run(capsys, "propose", "--budget", 18, "--tau", 0.3, *options)
        layouts = tmp_path / "layouts" / "stdlib-21x3"
        expected = pd.read_csv(layouts / "coverage.csv", index_col="strategy").loc[
            "densest", "coverage"
        ]
        assert expected < 0.78  # at tau 0.5 it is .80
        _, output, _ = run(capsys, "layout", "show", layouts / "densest.yaml", *options)
        assert f"coverage {100 * expected:.2f} %" in output.splitlines()[0]

    def test_diff(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        Layout(("GL", "LG"), 8, "a").write(tmp_path / "a.yaml")
        Layout(("GG", "LL"), 8, "b").write(tmp_path / "b.yaml")
        Layout(("GL", "LG"), 9, "c").write(tmp_path / "c.yaml")
        Layout(("GL", "LG"), 8, "d", {"seed": 1}).write(tmp_path / "d.yaml")
        code, output, _ = run(capsys, "layout", "diff", tmp_path / "a.yaml", tmp_path / "b.yaml")
        assert code == 1
        assert "2 heads differ, Jaccard index of the global heads 0.333" in output
        assert output.splitlines()[-2:] == ["   0  G+", "   1  .-"]
        code, output, _ = run(capsys, "layout", "diff", tmp_path / "a.yaml", tmp_path / "c.yaml")
        assert code == 1
        assert "0 heads differ" in output
        assert "window 9" in output
        code, output, _ = run(capsys, "layout", "diff", tmp_path / "a.yaml", tmp_path / "d.yaml")
        assert (code, output.startswith("the same layout: 2 layers x 2 KV heads")) == (0, True)

    def test_mistakes(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, duo: Path) -> None:
        Layout(("GL",), 8).write(tmp_path / "a.yaml")
        ours, scores = COMMITTED / "densest.yaml", duo / "full_attention_heads.tsv"
        for arguments, message in [
            (
                ("layout", "diff", tmp_path / "a.yaml", ours),
                "1 layers x 2 KV heads, the second has 21 layers x 3",
            ),
            (("layout", "show", tmp_path / "a.yaml", "-p", scores), "has 4 layers x 3 KV heads"),
            (("layout", "show", duo), f"spkv-nas layout convert {duo} {duo}.yaml --budget 25%"),
            (("layout", "show", tmp_path / "none.yaml"), "layout not found"),
            (("layout", "convert", duo, tmp_path / "x.yaml"), "--budget N"),
            (
                ("propose", "--probe", scores, "-b", "6", "--tau", "0.7"),
                "--tau applies to densities only",
            ),
            (("schema", "letter"), "expected layout or recipe"),
        ]:
            code, _, error = run(capsys, *arguments)
            assert code == 2
            assert message in error

    @pytest.mark.filterwarnings("default:layout:UserWarning")
    def test_an_edited_layout_warns_in_plain_words(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "a.yaml"
        Layout(("GL",), 8).write(path)
        path.write_text(path.read_text().replace("GL", "GG"))
        code, output, error = run(capsys, "layout", "show", path)
        assert code == 0
        assert "GG" in output
        assert error.startswith("warning: layout")
        assert "UserWarning" not in error

    def test_propose_and_convert(
        self, capsys: pytest.CaptureFixture[str], duo: Path, tmp_path: Path
    ) -> None:
        options = ("--workspace", tmp_path / "w")
        table = ("--probe", duo / "full_attention_heads.tsv")
        code, output, _ = run(
            capsys, "propose", *table, "--budget", "3", "--num-random", "0", *options
        )
        assert code == 0
        assert "coverage of duo-attention" in output
        run(capsys, "layout", "convert", duo, tmp_path / "x.yaml", "--budget", "3")
        densest = tmp_path / "w" / "layouts" / duo.name / "densest.yaml"
        assert run(capsys, "layout", "diff", tmp_path / "x.yaml", densest)[0] == 0

    def test_schema_of_a_layout(self, capsys: pytest.CaptureFixture[str]) -> None:
        schema = json.loads(run(capsys, "schema")[1])
        data = yaml.safe_load((COMMITTED / "densest.yaml").read_text())
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) <= set(data) <= set(schema["properties"])
        assert schema["properties"]["format"]["const"] == data["format"]
        row = schema["properties"]["heads"]["items"]["pattern"]
        assert all(re.search(row, letters) for letters in data["heads"])
        assert not re.search(row, "GLg")

    def test_schema_of_a_recipe(self, capsys: pytest.CaptureFixture[str]) -> None:
        schema = json.loads(run(capsys, "schema", "recipe")[1])
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert set(schema["required"]) == {"name", "model", "data"}
        assert schema["$defs"]["GatesConfig"]["properties"]["window"]["minimum"] == 1
