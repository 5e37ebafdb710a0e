"""Test files that are damaged, hostile or foreign: accepted, or refused in a few clear lines; never a crash."""

from __future__ import annotations

import codecs
import math
import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from attack.mutants import attack
from attack.readers import READERS, make_probe
from helpers import fails, make_comparison, make_layouts, make_search, make_table
from marks import slow_after
from paths import ROOT, tracked

from spkv_nas.artifacts.comparison import read_comparison, write_comparison
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import PROBE_PAIRS
from spkv_nas.base import replace as replacement
from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import parse_yaml, read_text, read_yaml, write_npz
from spkv_nas.base.records import read_record, write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import write_csv
from spkv_nas.base.workspace import Workspace
from spkv_nas.cli import main
from spkv_nas.contrib.compare.stage import agreement
from spkv_nas.contrib.search.storage import open_storage, open_study, storage_errors
from spkv_nas.data import tokenizer as tokenizers
from spkv_nas.data.blocks import build_blocks
from spkv_nas.data.sources import Document, documents
from spkv_nas.report.chart import round_axis


@pytest.mark.parametrize("number", slow_after(1, [3, 120]))
def test_every_reader_survives_mutants(number: int) -> None:
    outcomes = {reader.name: attack(reader, number) for reader in READERS}
    assert {name: outcome.crashes for name, outcome in outcomes.items() if outcome.crashes} == {}
    assert [name for name, outcome in outcomes.items() if not outcome.refused] == []


@pytest.mark.filterwarnings("ignore:.*edited or damaged:UserWarning")
def test_every_reader_of_text_takes_a_byte_order_mark(tmp_path: Path) -> None:
    """JSON and records that were saved by Windows programs were refused."""
    for reader in READERS:
        folder = tmp_path / reader.name
        folder.mkdir()
        file = reader.make(folder)
        if file.suffix in (".npz", ".parquet"):
            continue
        content = file.read_bytes()
        file.write_bytes(codecs.BOM_UTF8 + content)
        reader.read(file)
        file.write_bytes(content.decode().encode("utf-16"))
        with pytest.raises(UserError, match="it is UTF-16, UTF-32 or binary: save it as UTF-8"):
            reader.read(file)


class TestText:
    @pytest.mark.parametrize(
        "text",
        [
            "a: " + "[" * 2000,
            "a: 2024-13-45",
            "a: !!int x",
            "a: " + "9" * 5000,
            "? [1]\n: 2",
            "a: !!binary z",
            "\x00",
        ],
    )
    def test_yaml(self, text: str) -> None:
        """Unbalanced brackets, impossible dates and bad numbers are user errors."""
        with pytest.raises(UserError, match=r"^recipe x is not valid YAML:") as error:
            parse_yaml(text, "recipe x")
        assert len(str(error.value)) < 1000

    def test_a_file_too_large_to_parse(self) -> None:
        with pytest.raises(UserError, match="more than 2 Mi characters"):
            parse_yaml("a: " + "x" * (2 << 20), "recipe x")

    def test_names_that_no_file_has(self, tmp_path: Path) -> None:
        for name in ("x" * 300, "a\0b"):
            for read in (read_yaml, read_text):
                with pytest.raises(UserError):
                    read(tmp_path / name, "recipe")
            with pytest.raises(UserError):
                HeadScores.read(tmp_path / name)

    def test_a_named_pipe_does_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.yaml")
        with pytest.raises(UserError, match="it is not a regular file"):
            read_text(tmp_path / "pipe.yaml", "recipe")

    def test_long_values_are_shortened(self) -> None:
        error = UserError(f"there is no file {'x' * 10**6}\x1b[31m")
        assert len(str(error)) <= 900
        assert "\x1b" not in str(error)


class TestComparison:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "the file is empty"),
            (b"rubbish", "column 'strategy' is missing"),
            (b"strategy,nll\nx,1,2\n", "line 2: 3 values for 2 columns"),
            (b"strategy,nll\nx,1e300\n", "line 2: column 'nll' must be"),
            (b"strategy\n\xff\n", "cannot read comparison"),
        ],
    )
    def test_a_damaged_one_is_named(self, content: bytes, message: str, tmp_path: Path) -> None:
        (tmp_path / "comparison.csv").write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_comparison(tmp_path / "comparison.csv")

    def test_comparison_without_rows(self, tmp_path: Path) -> None:
        (tmp_path / "comparison.csv").write_text("strategy,nll\n")
        assert read_comparison(tmp_path / "comparison.csv").empty


SPECS = (
    Array("tokens", "whole", "N T"),
    Array("edges", "number", "n+1", low=-9, high=9, ascending=True),
    Array("names", "text", "N"),
)
SOUND = {
    "tokens": np.ones((2, 3), np.int32),
    "edges": np.array([-1.0, 0, 2]),
    "names": np.array(["a", "b"]),
}


class TestArrays:
    def read(self, folder: Path, **changes: object) -> dict[str, np.ndarray]:
        write_npz(
            folder / "x.npz",
            {**SOUND, **{name: np.asarray(value) for name, value in changes.items()}},
        )
        return read_arrays(folder / "x.npz", SPECS, "make it again")

    def test_sound_ones_are_read(self, tmp_path: Path) -> None:
        assert self.read(tmp_path)["tokens"].shape == (2, 3)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tokens": [[1.0, 2.0]]}, "'tokens' holds float64; expected whole numbers"),
            ({"tokens": [1, 2]}, r"'tokens' is of shape \[2\]; expected \[N, T\]"),
            ({"tokens": [[], []]}, "'tokens' holds float64"),
            ({"tokens": [[1, -1], [0, 0]]}, "'tokens' holds -1; expected whole numbers from 0"),
            ({"tokens": [[1, 2**62], [0, 0]]}, "'tokens' holds 4611686018427387904"),
            ({"edges": [0.0, np.nan]}, "'edges' holds nan; expected finite numbers from -9 to 9"),
            ({"edges": [0.0, 0.0]}, "'edges' does not ascend"),
            ({"edges": [0.0]}, "'edges' is of shape"),
            ({"names": ["a"]}, "'names' is of shape .* with N = 2"),
            ({"names": [1, 2]}, "'names' holds int64; expected text"),
        ],
    )
    def test_others_are_named(
        self, changes: dict[str, object], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(UserError, match=f"x.npz is damaged: {message}.*\nmake it again"):
            self.read(tmp_path, **changes)

    @pytest.mark.slow
    def test_a_decompression_bomb(self, tmp_path: Path) -> None:
        write_npz(
            tmp_path / "x.npz", {**SOUND, "tokens": np.zeros((2, (1 << 30) // 2 + 1), np.int8)}
        )
        with pytest.raises(UserError, match="bytes claim to hold"):
            read_arrays(tmp_path / "x.npz", SPECS, "make it again")

    def test_a_histogram_of_another_grid(self, tmp_path: Path) -> None:
        """A histogram whose grid is not the table's is refused."""
        table = make_probe()
        assert table.histogram is not None
        other = replace(table.histogram, counts=table.histogram.counts[:, :3])
        replace(table, histogram=other, documents=None).write(tmp_path)
        with pytest.raises(
            UserError,
            match=r"histogram\.npz is for 3 layers x 2 KV heads, the table in its folder has 4",
        ):
            HeadScores.read(tmp_path)


class TestSources:
    def read(self, folder: Path, content: bytes) -> list[Document]:
        (folder / "a.jsonl").write_bytes(content)
        return list(documents([str(folder / "a.jsonl")], folder))

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"null", "expected an object .* found null"),
            (b"[1]", "found a list"),
            (b'{"text": "a"', "not valid JSON"),
            (b'{"text": "\xff"}', "not valid JSON: 'utf-8' codec"),
            (b"[" * 100_000, "not valid JSON"),
            (b'{"text": 3}', "field 'text' is a number, not text"),
            (b'{"text": null}', "field 'text' is null, not text"),
            (b'{"text": {"content": "a"}}', "field 'text' is an object, not text"),
            (b'{"text": ["a"]}', "field 'text' is a list, not text"),
            (b'{"body": "a"}', "no field 'text'; its fields: body"),
        ],
        ids=[
            "null",
            "list",
            "cut",
            "bytes",
            "depth",
            "number",
            "null text",
            "object",
            "texts",
            "no text",
        ],
    )
    def test_a_line_of_json_is_named(self, line: bytes, message: str, tmp_path: Path) -> None:
        """Also a file that contains only ``null``."""
        with pytest.raises(UserError, match=rf"a\.jsonl, line 3: .*{message}"):
            self.read(tmp_path, b'{"text": "one"}\n\n' + line + b"\n")

    def test_characters_that_cannot_be_encoded_are_replaced(self, tmp_path: Path) -> None:
        (one,) = self.read(
            tmp_path, b'{"text": "a \\ud800 b", "domain": " w\\ne\\u0007b \\udfff"}\n'
        )
        assert one.text.encode().decode() == one.text
        assert one.text.startswith("a ")
        assert one.domain == r"w e\x07b \udfff"

    def test_long_texts_are_read_in_chunks(
        self, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: object
    ) -> None:
        """Memory and time do not grow with the length of one text."""
        monkeypatch.setattr(tokenizers, "MAX_ENCODED_CHARACTERS", 40)
        text = "the quick brown fox " * 3 + "\n" + "x" * 100 + " jumps"
        for most in (40, 10):
            result = list(tokenizers.pieces(text, most))
            assert "".join(result) == text
            assert max(map(len, result)) <= most
        assert list(tokenizers.pieces("y" * 40, 10)) == ["y" * 40]
        blocks = build_blocks([Document(text, "a", "b")], tiny_tokenizer, 4)  # type: ignore[arg-type]
        assert tiny_tokenizer.decode(blocks.tokens.ravel()).startswith(text[:100])  # type: ignore[attr-defined]


class TestRecords:
    def write(self, folder: Path) -> None:
        with replacing(folder) as new:
            write_comparison(new / "comparison.csv", make_comparison())
            write_npz(new / "counts.npz", {"a": np.ones(3)})
            write_record(new / "comparison.yaml", {"probe": "p", "text": "sha256: no"})

    @pytest.mark.parametrize("name", ["comparison.csv", "comparison.yaml"])
    def test_an_edit_warns(self, name: str, tmp_path: Path) -> None:
        self.write(tmp_path)
        assert read_record(tmp_path / "comparison.yaml", "comparison") == {
            "probe": "p",
            "text": "sha256: no",
        }
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace("probe: p", "probe: q").replace("2.004", "1.004"))
        with pytest.warns(UserWarning, match=f"{name}: edited or damaged after it was written"):
            read_record(tmp_path / "comparison.yaml", "comparison")

    def test_a_binary_file_is_damaged(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        (tmp_path / "counts.npz").write_bytes(b"other")
        with pytest.raises(UserError, match=r"counts\.npz is damaged.*\nremove it, or run"):
            read_record(tmp_path / "comparison.yaml", "comparison")

    def test_without_hashes_nothing_is_checked(self, tmp_path: Path) -> None:
        (tmp_path / "comparison.yaml").write_text("probe: p\n")
        assert read_record(tmp_path / "comparison.yaml", "comparison") == {"probe": "p"}

    def test_results_that_are_committed_read_without_a_warning(self) -> None:
        for file in tracked("probes/*/probe.yaml"):
            HeadScores.read(file.parent)
        for file in tracked("layouts/**/*.yaml"):
            Layout.read(file)
        for file in tracked("reports/**/*.yaml"):
            read_record(file, "record")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["comparison.csv", "search.csv", "agreement.csv"])
    def test_a_report_names_edited_files(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        table = make_table([[0.5, 0.25], [0.1, 0.7], [0.2, 0.3], [0.4, 0.6]])
        folder = tmp_path / "reports" / "p"
        table.write(tmp_path / "probes" / "p")
        for key, layout in make_layouts("densest", "last").items():
            layout.write(tmp_path / "layouts" / "p" / f"{key}.yaml")
        with replacing(folder) as new:
            write_comparison(new / "comparison.csv", make_comparison())
            write_record(new / "comparison.yaml", {"probe": "p"})
        with replacing(folder) as new:
            write_csv(new / "search.csv", make_search(heads=["GL LG GL LL"] * 5))
            write_record(new / "search.yaml", {"probe": "p"})
        PROBE_PAIRS.write(folder, agreement({"p": table, "q": table}, 3), {})
        main(["report", "--probe", "p", "--workspace", str(tmp_path)])
        assert "warning" not in capsys.readouterr().err
        (folder / name).write_text((folder / name).read_text() + "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # as on the command line
            main(["report", "--probe", "p", "--workspace", str(tmp_path)])
        assert f"{name}: edited or damaged after it was written" in " ".join(
            capsys.readouterr().err.split()
        ).replace(" /", "/")


def test_a_figure_without_numbers_has_an_axis() -> None:
    """The report of a search without scores is written."""
    assert len(round_axis("x", math.nan, math.nan).ticks) > 1


class TestResults:
    def test_a_damaged_study_is_named(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'study.db'}"
        storage = open_storage(url)
        open_study(storage, "x", {}, ["value"])
        storage.engine.dispose()
        data = bytearray((tmp_path / "study.db").read_bytes())
        data[100:20_000] = bytes(19_900)
        (tmp_path / "study.db").write_bytes(bytes(data))
        with pytest.raises(UserError, match=r"if its file is damaged, remove it"), storage_errors():
            open_study(open_storage(url), "x", {}, ["value"])

    def test_a_killed_probe_is_the_old_one_or_the_new(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old, new = make_table([[0.5, 0.25]]), make_probe()
        old.write(tmp_path)
        monkeypatch.setattr(replacement, "_settle", lambda folder: None)
        new.write(tmp_path)  # decided on, and killed before the files were moved
        assert HeadScores.read(tmp_path).grid == old.grid
        monkeypatch.undo()
        assert HeadScores.read(tmp_path).grid == new.grid

    def test_other_results_in_a_folder_survive(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("mine")
        make_table([[0.5, 0.25]]).write(tmp_path)
        make_table([[0.5, 0.25]]).write(tmp_path)
        assert (tmp_path / "mine.txt").read_text() == "mine"


class TestNames:
    @pytest.mark.parametrize(
        "command", ["probe", "evaluate", "calibrate micro-0", "reproduce palindrome", "search"]
    )
    def test_a_name_is_checked_before_any_work(
        self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("../../evil", "x" * 300):
            probe = (
                ["--probe", ROOT / "probes/stdlib-21x3/density.csv"] if command == "search" else []
            )
            message = fails(
                capsys, *command.split(), *probe, "--name", name, "--workspace", tmp_path / "w"
            )
            assert "cannot name a file" in message
            assert "loading" not in message
        assert [path.name for path in tmp_path.iterdir()] in ([], ["w"])

    def test_a_probe_that_calls_itself_by_a_path(self, tmp_path: Path) -> None:
        make_table([[0.5, 0.25]]).write(tmp_path)
        (tmp_path / "probe.yaml").write_text("name: ../../evil\n")
        with pytest.raises(
            UserError, match=r"probe\.yaml: key 'name': the probe '../../evil' cannot name a file"
        ):
            HeadScores.read(tmp_path)

    @pytest.mark.parametrize("kind", ["probes", "layouts", "reports", "runs"])
    def test_files_where_folders_should_be(self, kind: str, tmp_path: Path) -> None:
        workspace = Workspace(tmp_path)
        folder = {
            "probes": workspace.probe_dir,
            "layouts": workspace.layout_dir,
            "reports": workspace.report_dir,
            "runs": workspace.run_dir,
        }
        (tmp_path / kind).write_text("")
        with pytest.raises(UserError, match=f"{kind} is a file, where the workspace has a folder"):
            folder[kind]("x")
        (tmp_path / kind).unlink()
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "x").write_text("")
        with pytest.raises(UserError, match="x is a file, where the workspace has a folder"):
            folder[kind]("x")

    @pytest.mark.parametrize("strategy", ["full-attention", "sp-kv"])
    def test_a_layout_with_the_name_of_a_baseline(
        self, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "x.yaml"
        Layout(("GLL",) * 21, 32, strategy).write(file)
        for command in (
            ["score"],
            ["train-hybrid"],
            ["search", "--probe", str(ROOT / "probes/stdlib-21x3/density.csv")],
        ):
            if command[0] == "train-hybrid":
                command = [*command, "--probe", str(ROOT / "probes/stdlib-21x3/density.csv")]
            assert "is reserved for a baseline" in fails(
                capsys, *command, file, "--workspace", tmp_path
            )


class TestFlags:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["propose", "--seed", "1" + "0" * 30],
            ["propose", "--num-random", "1000000000"],
            ["search", "--trials", "1000000000000"],
            ["search", "--retrain", "1000000000000"],
            ["reproduce", "palindrome", "--steps", "1000000000000"],
            ["probe", "--context", "1000000000000"],
            ["plan", "attention", "--context", "9" * 30],
            ["plan", "attention", "--window", "9" * 30],
            ["calibrate", "--batch", "9" * 30],
            ["propose", "--budget", "9" * 30],
            ["generate", "hello", "--seed", "4294967295"],
        ],
    )
    def test_absurd_values_are_refused(
        self, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = [] if arguments[0] == "generate" else ["--workspace", str(tmp_path)]
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, *options])
        assert exit_.value.code == 2
        assert "Traceback" not in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
