"""Test that a text is read again only if it, or a setting that decides its blocks, has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from text_cases import bytes_tokenizer, prose, sixty_documents, write_files
from transformers import PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.data import block_files, splits
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.data.config import DataConfig, SourceConfig
from spkv_nas.data.sources import documents
from spkv_nas.data.splits import cache_split, load_heldout, load_text, read_split


def same(one: TokenBlocks, other: TokenBlocks) -> bool:
    return (
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.document, other.document)
        and tuple(one.documents) == tuple(other.documents)
    )


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return sixty_documents(tmp_path)


class TestCache:
    def test_the_next_start_reads_no_text(
        self, config: DataConfig, tmp_path: Path, monkeypatch: Any
    ) -> None:
        first = read_split(
            cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path), config
        )
        monkeypatch.setattr(splits, "documents", None)
        monkeypatch.setattr(splits, "heldout_share", None)
        again = read_split(
            cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path), config
        )
        assert all(map(same, first, again))
        assert same(load_heldout(config, bytes_tokenizer(), tmp_path / "cache", tmp_path), first[1])

    def test_held_out_text_alone_is_the_same(self, config: DataConfig, tmp_path: Path) -> None:
        alone = load_heldout(config, bytes_tokenizer(), tmp_path / "alone", tmp_path)
        _, together = read_split(
            cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path), config
        )
        assert same(alone, together)

    def test_a_text_that_changes_is_read_again(self, config: DataConfig, tmp_path: Path) -> None:
        first = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        file = tmp_path / "text" / "000.txt"
        file.write_text(file.read_text().upper())  # as long as it was
        assert cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path) != first

    def test_a_file_that_is_renamed_is_named_anew(self, config: DataConfig, tmp_path: Path) -> None:
        cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        for name in ("000.txt", "001.txt", "002.txt"):
            (tmp_path / "text" / name).rename(tmp_path / "text" / name.replace(".txt", "-new.txt"))
        parts = read_split(
            cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path), config
        )
        assert {d.name for part in parts for d in part.documents} == {
            d.name for d in documents(["text"], tmp_path)
        }

    def test_end_of_text_token_decides_the_blocks(self, config: DataConfig, tmp_path: Path) -> None:
        """Two tokenizers that differ only in their end-of-text token do not share blocks."""
        other = bytes_tokenizer()
        other.eos_token_id = 10
        folders = [
            cache_split(config, one, tmp_path / "cache", tmp_path)
            for one in (bytes_tokenizer(), other)
        ]
        assert [read_split(folder, config)[0].largest_token for folder in folders] == [
            256,
            ord("w"),
        ]

    def test_another_format_is_written_anew(
        self, config: DataConfig, tmp_path: Path, monkeypatch: Any
    ) -> None:
        first = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        monkeypatch.setattr(block_files, "_FORMAT", "another")
        assert cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path) != first

    def test_a_text_without_split(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write_files(tmp_path / "text", 30)
        loaded = load_text(["text"], tiny_tokenizer, tmp_path / "cache", tmp_path, block_size=32)
        expected = build_blocks(documents(["text"], tmp_path), tiny_tokenizer, block_size=32)
        assert isinstance(loaded.tokens, np.memmap)
        assert same(loaded, expected)
        assert loaded.largest_token == expected.largest_token

    def test_blocks_that_are_damaged_are_named(self, config: DataConfig, tmp_path: Path) -> None:
        folder = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        file = folder / "train" / "tokens.bin"
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
        with pytest.raises(
            UserError, match=r"token blocks .*train is damaged: tokens\.bin .*\nremove the folder"
        ):
            cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)

    def test_the_bar_reaches_the_end(self, tmp_path: Path) -> None:
        rows = [{"text": prose(3, i)} for i in range(50)]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pd.DataFrame({"text": [prose(3, i) for i in range(50, 100)]}).to_parquet(
            tmp_path / "b.parquet"
        )
        (tmp_path / "c.txt").write_text(prose(500))
        updates: list[tuple[int, int]] = []
        names = ["a.jsonl", "b.parquet", "c.txt"]
        list(documents(names, tmp_path, progress=lambda done, total: updates.append((done, total))))
        assert [done for done, _ in updates] == sorted(done for done, _ in updates)
        assert updates[-1] == (
            updates[0][1],
            sum((tmp_path / name).stat().st_size for name in names) // 1000,
        )

    def test_the_bar_of_one_long_document_counts_what_was_used(self, tmp_path: Path) -> None:
        """It was at its end, with no time left, for the minutes in which a line of 200 MB was tokenised."""
        text = prose(3000)
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
        updates: list[tuple[int, int]] = []
        total = len(text) // 1000
        used = 0
        for document in documents(
            ["a.jsonl"], tmp_path, piece=2000, progress=lambda *update: updates.append(update)
        ):
            assert updates == [] or updates[-1] == (used // 1000, total)
            used += len(document.text)
        assert len(updates) > 10
        assert updates[-1] == (total, total)


class TestDatasets:
    """Data sets of the ``datasets`` library, here of a folder, are cached in the same way."""

    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceConfig:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
        (tmp_path / "set").mkdir()
        self.write(tmp_path / "set", range(40))
        return SourceConfig(dataset=str(tmp_path / "set"), domain="web")

    def write(self, folder: Path, numbers: range) -> None:
        lines = (json.dumps({"text": prose(3, 10 * i)}) + "\n" for i in (*numbers, numbers[0]))
        (folder / "train.jsonl").write_text("".join(lines))

    def test_are_read_once_and_without_duplicates(
        self, source: SourceConfig, tmp_path: Path
    ) -> None:
        tokenizer = bytes_tokenizer()
        result = load_text([source], tokenizer, tmp_path / "cache", tmp_path, block_size=64)
        assert len(result.documents) == len(tokenizer.texts) == 40
        assert result.domains == ("web",)
        assert same(
            load_text([source], tokenizer, tmp_path / "cache", tmp_path, block_size=64), result
        )
        assert len(tokenizer.texts) == 40
        self.write(tmp_path / "set", range(41))
        assert (
            len(
                load_text(
                    [source], tokenizer, tmp_path / "cache", tmp_path, block_size=64
                ).documents
            )
            == 41
        )

    def test_files_changed_within_a_clock_tick_are_read_again(
        self, source: SourceConfig, tmp_path: Path
    ) -> None:
        load_text([source], bytes_tokenizer(), tmp_path / "cache", tmp_path, block_size=64)
        file = tmp_path / "set" / "train.jsonl"
        before = file.stat()
        file.write_text(file.read_text().replace("paragraph", "PARAGRAPH"))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        tokenizer = bytes_tokenizer()
        load_text([source], tokenizer, tmp_path / "cache", tmp_path, block_size=64)
        assert tokenizer.texts[0].startswith("PARAGRAPH")

    def test_interrupted_downloads_are_named(
        self, source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lost network connection is a user error."""

        def broken(self: Any) -> Iterator[dict[str, str]]:
            yield {"text": prose(3)}
            raise ConnectionError("gone")

        monkeypatch.setattr(datasets.IterableDataset, "__iter__", broken)
        with pytest.raises(UserError, match=r"cannot be read after 1 rows: ConnectionError: gone$"):
            list(documents([source], tmp_path))

    def test_a_split_that_is_not_there(self, source: SourceConfig, tmp_path: Path) -> None:
        other = source.model_copy(update={"split": "nope"})
        with pytest.raises(UserError, match=r"cannot load data set .*nope"):
            list(documents([other], tmp_path))
