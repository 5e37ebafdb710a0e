"""Test tokenizing text of any size: in pieces, in bounded memory, into files that fit together."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from text_cases import bytes_tokenizer, prose, sixty_documents, write_files

from spkv_nas.base.errors import UserError
from spkv_nas.data import readers
from spkv_nas.data.block_files import map_blocks, publish, write_blocks
from spkv_nas.data.config import DataConfig
from spkv_nas.data.sources import Document, documents, heldout
from spkv_nas.data.splits import cache_split, heldout_share, load_text, read_split
from spkv_nas.data.tokenizer import cut, piece_size


class TestPieces:
    def test_make_up_the_text_and_end_with_paragraphs(self) -> None:
        text = prose(500)
        result = list(cut([text], 1000))
        assert "".join(result) == text
        assert all(piece.endswith("\n\n") for piece in result)
        assert all(500 <= len(piece) <= 1500 for piece in result)

    @pytest.mark.parametrize("step", [1, 7, 999, 1000, 1001, 5000])
    def test_blocks_do_not_depend_on_how_text_is_read(self, step: int) -> None:
        text = prose(100) + "x" * 3000 + prose(50)
        assert list(cut((text[i : i + step] for i in range(0, len(text), step)), 1000)) == list(
            cut([text], 1000)
        )

    def test_a_text_that_grows_keeps_its_first_chunks(self) -> None:
        before, after = list(cut([prose(200)], 1000)), list(cut([prose(300)], 1000))
        assert after[: len(before) - 1] == before[:-1]


class TestLongDocuments:
    def test_a_long_file_is_read_in_chunks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readers.tokenizer, "MAX_ENCODED_CHARACTERS", 5000)
        (tmp_path / "long.txt").write_text(prose(300))
        result = list(documents(["long.txt"], tmp_path, piece=1000))
        assert [d.text for d in result] == list(cut([prose(300)], 1000))
        assert [d.piece for d in result] == list(range(len(result)))
        assert result[2].label == "long.txt, piece 3"

    def test_many_documents_stay_whole(self, tmp_path: Path) -> None:
        for i in range(20):
            (tmp_path / f"{i}.txt").write_text(prose(100, i))
        assert all(d.piece is None for d in documents(["."], tmp_path, piece=500))
        (tmp_path / "0.txt").unlink()
        assert all(d.piece is not None for d in documents(["."], tmp_path, piece=500))

    def test_equal_chunks_are_separate_documents(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("the same line\n" * 1000)
        result = list(documents(["a.txt"], tmp_path, piece=1400))
        assert len({d.text for d in result}) == 1
        assert len({d.id for d in result}) == len(result) == 10

    def test_binary_content_after_text_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readers.tokenizer, "MAX_ENCODED_CHARACTERS", 5000)
        (tmp_path / "long.txt").write_bytes(prose(2000).encode() + b"\xff" + prose(2000).encode())
        with pytest.raises(UserError, match=r"cannot read .*long\.txt after \d+ chunks: .*utf-8"):
            list(documents(["long.txt"], tmp_path, piece=1000))


class TestShare:
    @pytest.mark.parametrize("share", [1e-9, 0.5, 0.999999])
    @pytest.mark.parametrize("number", [3, 19, 40])
    def test_both_parts_have_text(self, number: int, share: float, tmp_path: Path) -> None:
        config = DataConfig(
            sources=[str(write_files(tmp_path / "text", number))], block_size=16, heldout=share
        )
        folder = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        train, kept_out = read_split(folder, config)
        assert len(kept_out.documents) >= 2
        assert len(train.documents) + len(kept_out.documents) == number
        assert not {d.id for d in train.documents} & {d.id for d in kept_out.documents}

    def test_share_of_the_recipe(self, tmp_path: Path) -> None:
        write_files(tmp_path / "text", 200)
        messages: list[str] = []
        assert (
            heldout_share(DataConfig(sources=["text"], block_size=16), tmp_path, messages.append)
            == 0.05
        )
        assert messages == []

    def test_another_share_is_reported(self, tmp_path: Path) -> None:
        write_files(tmp_path / "text", 8)
        messages: list[str] = []
        share = heldout_share(
            DataConfig(sources=["text"], block_size=16, heldout=1e-6), tmp_path, messages.append
        )
        assert sum(heldout(d, share) for d in documents(["text"], tmp_path)) == 2
        assert messages[0].startswith(
            "data.heldout 1e-06 would hold out 0 of 8 documents; 2 are held out"
        )

    def test_one_long_file_is_split(self, tmp_path: Path) -> None:
        """One file gives training and held-out text."""
        (tmp_path / "corpus.txt").write_text(prose(12_000))
        config = DataConfig(sources=["corpus.txt"], block_size=64)
        folder = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        train, kept_out = read_split(folder, config)
        assert len(kept_out.documents) >= 2
        number = len(list(documents(["corpus.txt"], tmp_path, piece=piece_size(64))))
        assert len(train.documents) + len(kept_out.documents) == number

    def test_a_limit_takes_tokens_of_several_chunks(self, tmp_path: Path) -> None:
        """A single chunk would give no standard error."""
        (tmp_path / "corpus.txt").write_text(prose(2000))
        options: dict[str, Any] = {"block_size": 64, "max_tokens": 256}
        result = load_text(
            ["corpus.txt"], bytes_tokenizer(), tmp_path / "cache", tmp_path, **options
        )
        assert len(result.documents) == result.num_blocks == 4

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "the text is empty"),
            (
                prose(10),
                r"one document of \d+ characters, too short .*\n.* or shorter blocks",
            ),
        ],
    )
    def test_too_short_text_is_named(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(UserError, match=message):
            heldout_share(DataConfig(sources=["a.txt"]), tmp_path)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return sixty_documents(tmp_path)


class TestFiles:
    def contents(self, folder: Path) -> dict[str, bytes]:
        files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name[0] != ".")
        return {str(p.relative_to(folder)): p.read_bytes() for p in files}

    @pytest.mark.parametrize("patience", [2, 20])
    def test_a_killed_command_starts_again(
        self, patience: int, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a kill at any document, the next start ends with the files of an undisturbed run."""
        monkeypatch.setattr("spkv_nas.data.sources.TOKENIZE_BATCH", 1)
        expected = cache_split(config, bytes_tokenizer(), tmp_path / "undisturbed", tmp_path)
        with pytest.raises(KeyboardInterrupt):
            cache_split(config, bytes_tokenizer(patience), tmp_path / "cache", tmp_path)
        folder = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        assert self.contents(folder) == self.contents(expected)
        assert not (tmp_path / "cache" / ".partial").exists()

    @pytest.mark.parametrize(
        ("name", "damage", "message"),
        [
            ("tokens.bin", lambda data: data[:-16], "mmap length is greater"),
            (
                "document.bin",
                lambda data: data[:-4] + b"\x7f" * 4,
                "their documents do not match their tokens",
            ),
            (
                "documents.jsonl",
                lambda data: data[: len(data) // 2],
                r"documents.jsonl, line \d is damaged",
            ),
            (
                "documents.jsonl",
                lambda data: data.splitlines(keepends=True)[0],
                "it has 1 documents, not 3",
            ),
            (
                "blocks.json",
                lambda data: data.replace(b'"num_blocks": 3', b'"num_blocks": [3]'),
                "key 'num_blocks'",
            ),
            (
                "blocks.json",
                lambda data: data.replace(b"num_documents", b"documents"),
                "'num_documents' is missing",
            ),
        ],
    )
    def test_files_that_do_not_fit_together_are_named(
        self, name: str, damage: Any, message: str, tmp_path: Path
    ) -> None:
        """With a manifest made to fit, they ended commands with a ValueError of mmap, a KeyError or an IndexError."""
        documents = (
            (Document(str(number), "a", str(number)), np.arange(4, dtype=np.int32))
            for number in range(3)
        )
        publish(
            tmp_path / "partial",
            tmp_path / "blocks",
            write_blocks(tmp_path / "partial", documents, 4, "text"),
        )
        assert len(list(map_blocks(tmp_path / "blocks").documents)) == 3
        file = tmp_path / "blocks" / name
        file.write_bytes(damage(file.read_bytes()))
        with pytest.raises(UserError, match=message):
            list(map_blocks(tmp_path / "blocks").documents)


class TestMemory:
    """Peak memory does not grow with the text."""

    def peak(self, folder: Path, config: DataConfig) -> int:
        tracemalloc.start()
        try:
            cache_split(config, bytes_tokenizer(), folder / "cache", folder)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
    def test_of_a_long_text(
        self, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readers.tokenizer, "MAX_ENCODED_CHARACTERS", 20_000)
        monkeypatch.setattr("spkv_nas.data.sources.MAX_ENCODED_CHARACTERS", 20_000)
        peaks = []
        for megabytes in (1, 3):
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
