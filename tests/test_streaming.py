"""Text of any size becomes token blocks: in pieces where it is long, in bounded memory, and on from where it was."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from transformers import PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Reporter
from spkv_nas.data import block_files, readers, splits
from spkv_nas.data.block_files import BlockWriter, map_blocks
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.data.config import DataConfig, SourceConfig
from spkv_nas.data.heldout import HeldOut, heldout_share
from spkv_nas.data.pieces import cut
from spkv_nas.data.sources import Document, documents, heldout
from spkv_nas.data.splits import cache_split, load_heldout, load_text, read_split


class Bytes:
    """A tokenizer whose tokens are the bytes; it counts the texts that it was given."""

    eos_token_id = 256
    backend_tokenizer = SimpleNamespace(to_str=lambda: "bytes")

    def __init__(self, patience: int = 10**9) -> None:
        self.texts, self._patience = 0, patience

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[np.ndarray]]:
        self.texts += len(texts)
        if self.texts > self._patience:
            raise KeyboardInterrupt
        return {"input_ids": [np.frombuffer(text.encode(), np.uint8) for text in texts]}


def bytes_tokenizer(patience: int = 10**9) -> Any:
    """As the type checker wants it; interrupted after ``patience`` texts."""
    return Bytes(patience)


def prose(number: int, start: int = 0) -> str:
    """So many short paragraphs that differ."""
    return "".join(f"paragraph {i} has {i * i % 97} words\nin two lines\n\n" for i in range(start, start + number))


def write_files(folder: Path, number: int) -> Path:
    folder.mkdir()
    for i in range(number):
        (folder / f"{i:03}.txt").write_text(prose(6, 100 * i))
    return folder


def same(one: TokenBlocks, other: TokenBlocks) -> bool:
    return (
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.document, other.document)
        and tuple(one.documents) == tuple(other.documents)
    )


class TestPieces:
    def test_make_up_the_text_and_end_with_paragraphs(self) -> None:
        text = prose(500)
        found = list(cut([text], 1000))
        assert "".join(found) == text
        assert all(piece.endswith("\n\n") for piece in found)
        assert all(500 <= len(piece) <= 1500 for piece in found)

    @pytest.mark.parametrize("step", [1, 7, 999, 1000, 1001, 5000])
    def test_do_not_show_how_the_text_was_read(self, step: int) -> None:
        text = prose(100) + "x" * 3000 + prose(50)
        assert list(cut((text[i : i + step] for i in range(0, len(text), step)), 1000)) == list(cut([text], 1000))

    def test_a_text_that_grows_keeps_its_first_pieces(self) -> None:
        before, after = list(cut([prose(200)], 1000)), list(cut([prose(300)], 1000))
        assert after[: len(before) - 1] == before[:-1]


class TestLongDocuments:
    def test_a_file_too_long_to_be_one_document_is_read_in_pieces(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readers, "MOST_CHARACTERS", 5000)
        (tmp_path / "long.txt").write_text(prose(300))
        found = list(documents(["long.txt"], tmp_path, piece=1000))
        assert [d.text for d in found] == list(cut([prose(300)], 1000))
        assert [d.piece for d in found] == list(range(len(found)))
        assert found[2].label == "long.txt, piece 3"

    def test_many_documents_stay_whole(self, tmp_path: Path) -> None:
        for i in range(20):
            (tmp_path / f"{i}.txt").write_text(prose(100, i))
        assert all(d.piece is None for d in documents(["."], tmp_path, piece=500))
        (tmp_path / "0.txt").unlink()
        assert all(d.piece is not None for d in documents(["."], tmp_path, piece=500))

    def test_pieces_that_are_alike_are_documents_of_their_own(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("the same line\n" * 1000)
        found = list(documents(["a.txt"], tmp_path, piece=1400))
        assert len({d.text for d in found}) == 1
        assert len({d.id for d in found}) == len(found) == 10

    def test_what_is_no_text_after_a_while_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readers, "MOST_CHARACTERS", 5000)
        (tmp_path / "long.txt").write_bytes(prose(2000).encode() + b"\xff" + prose(2000).encode())
        with pytest.raises(UserError, match=r"cannot read .*long\.txt after \d+ pieces of it: .*utf-8"):
            list(documents(["long.txt"], tmp_path, piece=1000))


class TestShare:
    @pytest.mark.parametrize("share", [1e-9, 0.05, 0.5, 0.999999])
    @pytest.mark.parametrize("number", [3, 8, 19, 40])
    def test_both_parts_have_text(self, number: int, share: float, tmp_path: Path) -> None:
        config = DataConfig(sources=[str(write_files(tmp_path / "text", number))], block_size=16, heldout=share)
        folder = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        train, kept_out = read_split(folder, config)
        assert len(kept_out.documents) >= 2
        assert len(train.documents) + len(kept_out.documents) == number
        assert not {d.id for d in train.documents} & {d.id for d in kept_out.documents}

    def test_is_that_of_the_recipe_where_it_does(self, tmp_path: Path) -> None:
        write_files(tmp_path / "text", 200)
        said: list[str] = []
        assert heldout_share(DataConfig(sources=["text"], block_size=16), tmp_path, said.append) == 0.05
        assert said == []

    def test_another_one_is_said(self, tmp_path: Path) -> None:
        write_files(tmp_path / "text", 8)
        said: list[str] = []
        share = heldout_share(DataConfig(sources=["text"], block_size=16, heldout=1e-6), tmp_path, said.append)
        assert sum(heldout(d, share) for d in documents(["text"], tmp_path)) == 2
        assert said[0].startswith("data.heldout 1e-06 would hold out 0 of 8 documents: 2 are")

    def test_one_long_file_is_parted(self, tmp_path: Path) -> None:
        """It used to end with "the held-out text is empty"."""
        (tmp_path / "corpus.txt").write_text(prose(12_000))
        config = DataConfig(sources=["corpus.txt"], block_size=64)
        said: list[str] = []
        folder = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path, Reporter(announce=said.append))
        train, kept_out = read_split(folder, config)
        assert len(kept_out.documents) >= 2
        number = len(train.documents) + len(kept_out.documents)
        assert said == [f"corpus.txt is one long document: its {number} pieces serve as documents"]
        again: list[str] = []
        cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path, Reporter(announce=again.append))
        assert again == said

    def test_one_piece_gives_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "corpus.txt").write_text(prose(2000))
        said: list[str] = []
        options: dict[str, Any] = {"block_size": 64, "max_tokens": 100, "reporter": Reporter(announce=said.append)}
        load_text(["corpus.txt"], bytes_tokenizer(), tmp_path / "cache", tmp_path, **options)
        assert said == ["corpus.txt is one long document, of which one piece is read: no standard error can be given"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "the text is empty"),
            (
                prose(10),
                r"one document of \d+ characters, too short .*\n.* data\.sources, or a smaller data\.block_size",
            ),
        ],
    )
    def test_what_is_too_short_is_named(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(UserError, match=message):
            heldout_share(DataConfig(sources=["a.txt"]), tmp_path)


@pytest.mark.parametrize("most", [1, 100, 2500, 10**9])
def test_held_out_documents_are_those_of_the_smallest_hashes(most: int) -> None:
    found = [Document(prose(2, i), "a", str(i)) for i in range(100)]
    kept = HeldOut(most)
    for document in found:
        if kept.wants(document):
            kept.add(document, np.zeros(len(document.text), np.int32))
    expected, total = [], 0
    for document in sorted(found, key=lambda document: document.id):
        if total < most:
            expected.append(document.id)
            total += len(document.text)
    assert [d.id for d in kept.blocks(1).documents] == expected


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Sixty documents, of which some are held out."""
    return DataConfig(sources=[str(write_files(tmp_path / "text", 60))], block_size=64, heldout=0.3)


class TestRestart:
    """Killed at any document, the next start takes up what is there and ends with the same files."""

    def contents(self, folder: Path) -> dict[str, bytes]:
        files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name[0] != ".")
        return {str(p.relative_to(folder)): p.read_bytes() for p in files}

    def run(self, config: DataConfig, tokenizer: Any, folder: Path) -> dict[str, bytes]:
        return self.contents(cache_split(config, tokenizer, folder, folder))

    @pytest.mark.parametrize("kills", [[1], [20], [20, 30, 10]])
    def test_ends_as_an_undisturbed_run(
        self, kills: list[int], config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("spkv_nas.data.blocks.TOKENIZE_BATCH", 1)
        whole = bytes_tokenizer()
        expected = self.run(config, whole, tmp_path / "undisturbed")
        texts = 0
        for patience in kills:
            killed = bytes_tokenizer(patience)
            with pytest.raises(KeyboardInterrupt):
                self.run(config, killed, tmp_path / "cache")
            texts += patience
        last = bytes_tokenizer()
        assert self.run(config, last, tmp_path / "cache") == expected
        held = len(load_heldout(config, last, tmp_path / "cache", tmp_path).documents)
        assert texts + last.texts <= whole.texts + held * len(kills)  # only what is held out was tokenised again

    @pytest.mark.parametrize("name", ["tokens.bin", "document.bin", "documents.jsonl"])
    @pytest.mark.parametrize("damage", [lambda data: data + b"torn", lambda data: data[:-5], lambda data: b""])
    def test_what_a_killed_writer_left_is_cut_to_what_is_whole(self, name: str, damage: Any, tmp_path: Path) -> None:
        found = [Document(prose(2, i), "a", str(i)) for i in range(9)]

        def write(folder: Path, number: int) -> None:
            with BlockWriter(folder.with_suffix(".partial"), 16, "text") as writer:
                for document in found[:number]:
                    if not writer.has(document):
                        writer.add(document, np.frombuffer(document.text.encode(), np.uint8))
                if number == len(found):
                    writer.finish(folder)

        write(tmp_path / "undisturbed", 9)
        write(tmp_path / "blocks", 5)
        file = tmp_path / "blocks.partial" / name
        file.write_bytes(damage(file.read_bytes()))
        write(tmp_path / "blocks", 9)
        assert self.contents(tmp_path / "blocks") == self.contents(tmp_path / "undisturbed")

    def test_another_text_starts_anew(self, tmp_path: Path) -> None:
        def write(documents: list[Document], *, finish: bool) -> None:
            with BlockWriter(tmp_path / "partial", 4, "text") as writer:
                for document in documents:
                    if not writer.has(document):
                        writer.add(document, np.arange(5, dtype=np.int32))
                if finish:
                    writer.finish(tmp_path / "blocks")

        one, two, three = (Document(name, "a", name) for name in ("one", "two", "three"))
        write([one, two, three], finish=False)
        write([one, three], finish=True)
        assert [d.name for d in map_blocks(tmp_path / "blocks").documents] == ["one", "three"]

    def test_commits_are_what_lasts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A writer that is killed outright has had no chance to write what it held."""
        monkeypatch.setattr(block_files, "_COMMIT", 10)
        with BlockWriter(tmp_path / "killed", 4, "text") as writer:
            for name in ("one", "two", "three"):
                writer.add(Document(name, "a", name), np.arange(5, dtype=np.int32))
            shutil.copytree(tmp_path / "killed", tmp_path / "blocks")
        with BlockWriter(tmp_path / "blocks", 4, "text") as following:
            assert [following.has(Document(name, "a", name)) for name in ("one", "two", "three")] == [True, True, False]


class TestCache:
    def test_the_next_start_reads_no_text(self, config: DataConfig, tmp_path: Path, monkeypatch: Any) -> None:
        first = read_split(cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path), config)
        monkeypatch.setattr(splits, "documents", None)
        monkeypatch.setattr(splits, "heldout_share", None)
        again = read_split(cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path), config)
        assert all(map(same, first, again))
        assert same(load_heldout(config, bytes_tokenizer(), tmp_path / "cache", tmp_path), first[1])

    def test_held_out_text_alone_is_the_same(self, config: DataConfig, tmp_path: Path) -> None:
        alone = load_heldout(config, bytes_tokenizer(), tmp_path / "alone", tmp_path)
        _, together = read_split(cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path), config)
        assert same(alone, together)

    def test_a_text_that_changes_is_read_again(self, config: DataConfig, tmp_path: Path) -> None:
        first = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        file = tmp_path / "text" / "000.txt"
        file.write_text(file.read_text().upper())  # as long as it was
        assert cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path) != first

    def test_a_text_that_is_not_parted(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        write_files(tmp_path / "text", 30)
        options: dict[str, Any] = {"block_size": 32, "max_tokens": 2000}
        loaded = load_text(["text"], tiny_tokenizer, tmp_path / "cache", tmp_path, **options)
        expected = build_blocks(documents(["text"], tmp_path), tiny_tokenizer, **options)
        assert isinstance(loaded.tokens, np.memmap)
        assert same(loaded, expected)
        assert loaded.largest_token == expected.largest_token

    def test_blocks_that_are_damaged_are_named(self, config: DataConfig, tmp_path: Path) -> None:
        folder = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        file = folder / "train" / "tokens.bin"
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        with pytest.raises(UserError, match=r"token blocks .*train is damaged: tokens\.bin .*\nremove the folder"):
            cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)

    def test_the_bar_reaches_the_end(self, tmp_path: Path) -> None:
        rows = [{"text": prose(3, i)} for i in range(50)]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pd.DataFrame({"text": [prose(3, i) for i in range(50, 100)]}).to_parquet(tmp_path / "b.parquet")
        (tmp_path / "c.txt").write_text(prose(500))
        told: list[tuple[int, int]] = []
        names = ["a.jsonl", "b.parquet", "c.txt"]
        list(documents(names, tmp_path, progress=lambda done, total: told.append((done, total))))
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert told[-1] == (told[0][1], sum((tmp_path / name).stat().st_size for name in names) // 1000)


class TestDatasets:
    """Data sets of the ``datasets`` library, here of a folder, take the same way."""

    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceConfig:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
        (tmp_path / "set").mkdir()
        self.write(tmp_path / "set", range(40))
        return SourceConfig(dataset=str(tmp_path / "set"), domain="web")

    def write(self, folder: Path, numbers: range) -> None:
        lines = (json.dumps({"text": prose(3, 10 * i)}) + "\n" for i in (*numbers, numbers[0]))
        (folder / "train.jsonl").write_text("".join(lines))

    def test_are_read_once_and_without_duplicates(self, source: SourceConfig, tmp_path: Path) -> None:
        tokenizer = bytes_tokenizer()
        found = load_text([source], tokenizer, tmp_path / "cache", tmp_path, block_size=64)
        assert len(found.documents) == tokenizer.texts == 40
        assert found.domains == ("web",)
        assert same(load_text([source], tokenizer, tmp_path / "cache", tmp_path, block_size=64), found)
        assert tokenizer.texts == 40
        self.write(tmp_path / "set", range(41))
        assert len(load_text([source], tokenizer, tmp_path / "cache", tmp_path, block_size=64).documents) == 41

    def test_that_break_off_are_named(
        self, source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A network that was lost used to end in a traceback."""

        def broken(self: Any) -> Iterator[dict[str, str]]:
            yield {"text": prose(3)}
            raise ConnectionError("gone")

        monkeypatch.setattr(datasets.IterableDataset, "__iter__", broken)
        with pytest.raises(UserError, match=r"cannot be read after 1 rows: gone\nrun the command again: it goes on"):
            list(documents([source], tmp_path))

    def test_a_split_that_is_not_there(self, source: SourceConfig, tmp_path: Path) -> None:
        other = source.model_copy(update={"split": "nope"})
        with pytest.raises(UserError, match=r"cannot load data set .*nope"):
            list(documents([other], tmp_path))


class TestMemory:
    """The peak does not grow with the text: it used to be several times the text."""

    def peak(self, folder: Path, config: DataConfig) -> int:
        tracemalloc.start()
        try:
            cache_split(config, bytes_tokenizer(), folder / "cache", folder)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
    def test_of_a_long_text(self, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readers, "MOST_CHARACTERS", 20_000)
        monkeypatch.setattr("spkv_nas.data.blocks.MOST_CHARACTERS", 20_000)
        peaks = []
        for megabytes in (1, 4):
            file = tmp_path / f"{megabytes}{suffix}"
            self.write(file, megabytes)
            config = DataConfig(sources=[file.name], block_size=64, max_heldout_tokens=1000)
            peaks.append(self.peak(tmp_path, config))
        assert peaks[1] < 1.5 * peaks[0] + 100_000

    def write(self, file: Path, megabytes: int) -> None:
        def texts() -> Iterator[str]:
            for number in range(125 * megabytes):
                yield (f"{number} of many words, " * 500)[:8000] + "\n"

        if file.suffix == ".txt":
            file.write_text("".join(texts()))
        elif file.suffix == ".jsonl":
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
        else:
            pd.DataFrame({"text": list(texts())}).to_parquet(file, row_group_size=10)
