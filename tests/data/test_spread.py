"""Test that held-out text and samples of a text are spread over its documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_cases import bytes_tokenizer, prose

from spkv_nas.data import splits
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.config import DataConfig
from spkv_nas.data.sources import Document
from spkv_nas.data.splits import RULE, SpreadSample, cache_split, load_text, read_split
from spkv_nas.training.branches import branch_key
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

SIZES = [9, 40, 350, 64, 20, 900, 5, 130, 77, 31] * 4


def tokens_by_document(blocks: TokenBlocks) -> np.ndarray:
    counts = np.bincount(blocks.document.ravel(), minlength=len(blocks.documents))
    return counts[counts > 0]


def effective_number(blocks: TokenBlocks) -> float:
    counts = tokens_by_document(blocks).astype(float)
    return float(counts.sum() ** 2 / (counts**2).sum())


def texts(sizes: list[int]) -> list[tuple[Document, np.ndarray]]:
    """Return documents whose tokens encode document and position."""
    return [
        (Document(f"{i} {size}", "a", str(i)), 1000 * i + np.arange(size, dtype=np.int32))
        for i, size in enumerate(sizes)
    ]


def sampled(
    documents: list[tuple[Document, np.ndarray]], most: int, stretch: int = 16
) -> SpreadSample:
    sample = SpreadSample(most, stretch)
    for document, ids in documents:
        if sample.wants(document):
            sample.add(document, ids)
    return sample


class TestSample:
    @pytest.mark.parametrize("most", [1, 100, 400, 700, 2500, 10**9])
    def test_takes_a_section_of_every_document_before_a_second(self, most: int) -> None:
        result = texts(SIZES)
        kept = sampled(result, most).blocks(1, "text")
        counts = np.bincount([int(i.name) for i in kept.documents], minlength=len(SIZES))
        assert counts.max() == 1
        total = kept.tokens.size
        assert total == sum(SIZES) if most > sum(SIZES) else most <= total < most + 16
        held = np.bincount(kept.tokens.ravel() // 1000, minlength=len(SIZES))
        rounds = np.ceil(held / 16)
        whole = np.ceil(np.array(SIZES) / 16)
        assert all(
            number >= min(want, rounds.max() - 1)
            for number, want in zip(rounds, whole, strict=True)
        )

    def test_does_not_depend_on_the_order_of_documents(self) -> None:
        result = texts(SIZES)
        one, two = (sampled(order, 700).blocks(16, "text") for order in (result, result[::-1]))
        assert np.array_equal(one.tokens, two.tokens)
        assert one.documents == two.documents

    def test_added_text_replaces_only_the_last_sections(self) -> None:
        result, added = texts(SIZES), texts([*SIZES, 60, 3, 500])
        before, after = (sampled(some, 700) for some in (result, added))
        old = {stretch[:2] for stretch in before._kept}
        new = {stretch[:2] for stretch in after._kept}
        of_added = {document.id for document, _ in added[len(SIZES) :]}
        assert {key for key in new - old if key[1] not in of_added} == set()
        assert all(key > max(new) for key in old - new)

    def test_whole_stretches_are_whole_blocks_and_text_that_is_continuous(self) -> None:
        blocks = sampled(texts(SIZES), 2500).blocks(16, "text")
        single = [row for row in blocks.tokens if row[0] // 1000 == row[-1] // 1000]
        assert len(single) > 0.8 * blocks.num_blocks
        assert all(
            np.array_equal(row, np.arange(row[0], row[0] + 16))
            for row in single
            if row[0] % 1000 % 16 == 0
        )
        assert sum(row[0] % 1000 % 16 == 0 for row in single) >= 100
        flat = np.sort(blocks.tokens.ravel())
        assert len(np.unique(flat)) == len(flat)  # no token twice
        owner = [int(blocks.documents[d].name) for d in blocks.document.ravel()]  # type: ignore[index]
        assert np.array_equal(blocks.tokens.ravel() // 1000, owner)

    def test_longer_stretches_keep_the_context_of_longer_blocks(self) -> None:
        blocks = sampled(texts([200] * 30), 1000, stretch=64).blocks(16, "text")
        longer = blocks.cut(64)
        assert all(np.array_equal(row, np.arange(row[0], row[0] + 64)) for row in longer.tokens)

    def test_no_document_dominates(self) -> None:
        """A few long documents do not fill a small sample."""
        sample = sampled(texts([26_000, 24_000, *[1500] * 18]), 60_000)
        all_of_it, balanced = (sample.blocks(16, "text", balanced=each) for each in (False, True))
        assert effective_number(all_of_it) < 7
        assert effective_number(balanced) > 15
        assert tokens_by_document(balanced).max() <= 0.1 * balanced.tokens.size + 16

    def test_a_single_document_is_unchanged(self) -> None:
        assert sampled(texts([100]), 64).blocks(16, "text", balanced=True).tokens.size == 64


class TestSpread:
    """Blocks are drawn evenly over documents, not over tokens."""

    def blocks(self, sizes: list[int]) -> TokenBlocks:
        owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        documents = [DocumentInfo(str(i), "a", str(i)) for i in range(len(sizes))]
        return TokenBlocks(
            np.arange(4 * len(owner), dtype=np.int32).reshape(-1, 4),
            owner[:, None].repeat(4, 1),
            documents,
        )

    @pytest.mark.parametrize("number", [1, 3, 5, 7, 12, 40])
    def test_takes_a_block_of_every_document_before_a_second(self, number: int) -> None:
        sizes = [1, 30, 1, 2, 6]
        chosen = self.blocks(sizes).spread(number)
        counts = np.bincount(chosen.document[:, 0], minlength=5)
        assert counts.sum() == number
        assert all(
            count >= min(size, counts.max() - 1) for count, size in zip(counts, sizes, strict=True)
        )
        assert (np.diff(chosen.tokens[:, 0]) > 0).all()

    def test_a_limit_above_the_number_takes_all_blocks(self) -> None:
        blocks = self.blocks([3, 4])
        assert blocks.spread(99) is blocks


def write_uneven(folder: Path, number: int = 120) -> None:
    """Write files of which two are far longer than all others together."""
    folder.mkdir()
    for i in range(number):
        (folder / f"{i:03}.txt").write_text(prose(400 if i in (0, 1) else 5, 1000 * i))


class TestTexts:
    def test_a_token_limit_is_spread_over_documents(self, tmp_path: Path) -> None:
        """``--max-tokens`` takes tokens of every document."""
        write_uneven(tmp_path / "text")
        blocks = load_text(
            ["text"],
            bytes_tokenizer(),
            tmp_path / "cache",
            tmp_path,
            block_size=64,
            max_tokens=3200,
        )
        assert blocks.num_blocks == 50
        assert effective_number(blocks) > 45
        again = load_text(
            ["text"],
            bytes_tokenizer(),
            tmp_path / "cache",
            tmp_path,
            block_size=64,
            max_tokens=3200,
        )
        assert np.array_equal(again.tokens, blocks.tokens)

    def test_a_sample_reads_no_more_than_it_can_use(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_uneven(tmp_path / "text")
        monkeypatch.setattr(splits, "_MIN_REACH", 50_000)
        passed: list[Document] = []
        documents = splits.documents
        monkeypatch.setattr(
            splits,
            "documents",
            lambda *a, **k: (passed.append(d) or d for d in documents(*a, **k)),  # type: ignore[func-returns-value]
        )
        load_text(
            ["text"], bytes_tokenizer(), tmp_path / "cache", tmp_path, block_size=64, max_tokens=64
        )
        assert 2 <= len(passed) < 100

    @pytest.mark.parametrize("most", [64 * 40, 64 * 200, 10**6])
    def test_beginnings_of_separate_documents_are_the_sample_of_whole_ones(
        self, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All of every long document was tokenised for its first block; a sample of more of them still is of all."""
        (tmp_path / "text").mkdir()
        for i in range(60):
            (tmp_path / "text" / f"{i:02}.txt").write_text(prose(40 if i % 3 else 2, 1000 * i))
        encoded: list[int] = []
        encode = splits.tokenised

        def tokenised(documents: Iterable[Document], *rest: Any) -> Iterator[Any]:
            for document, ids in encode(documents, *rest):
                encoded.append(len(document.text))
                yield document, ids

        monkeypatch.setattr(splits, "tokenised", tokenised)

        def load(folder: str) -> TokenBlocks:
            limits: Any = {"block_size": 64, "max_tokens": most, "documents": "separate"}
            return load_text(["text"], bytes_tokenizer(), tmp_path / folder, tmp_path, **limits)

        beginnings = load("beginnings")
        num_read = sum(encoded)
        monkeypatch.setattr(splits, "_BEGINNING", 10**6)
        encoded.clear()
        whole = load("whole")
        assert np.array_equal(beginnings.tokens, whole.tokens)
        assert np.array_equal(beginnings.document, whole.document)
        assert [*beginnings.documents] == [*whole.documents]
        assert num_read < 0.7 * sum(encoded) if most == 64 * 40 else num_read >= sum(encoded)

    def test_held_out_text_is_spread_over_documents(self, tmp_path: Path) -> None:
        write_uneven(tmp_path / "text")
        config = DataConfig(sources=["text"], block_size=64, heldout=0.5, max_heldout_tokens=6400)
        folder = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        _, held = read_split(folder, config)
        assert held.tokens.size == 6400
        assert effective_number(held) > 40

    def test_blocks_of_the_older_rule_are_not_used(self, tmp_path: Path) -> None:
        write_uneven(tmp_path / "text")
        config = DataConfig(sources=["text"], block_size=64, heldout=0.5, max_heldout_tokens=6400)
        folder = cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        files = [path.name for path in folder.glob("heldout-*")]
        assert files == [f"heldout-{RULE}-6400-64.npz"]
        # The name that the older rule gave it
        (folder / files[0]).rename(folder / "heldout-6400.npz")
        cache_split(config, bytes_tokenizer(), tmp_path / "cache", tmp_path)
        assert (folder / files[0]).is_file()

    def test_branches_of_the_older_rule_are_not_used(
        self, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = []
        for rule in (RULE, RULE + 1):
            monkeypatch.setattr("spkv_nas.training.branches.RULE", rule)
            keys.append(branch_key(recipe, "origin", Variant.full_attention(), 0))
        assert keys[0] != keys[1]

    def test_a_recipe_with_longer_blocks_keeps_their_context(self, recipe: Recipe) -> None:
        assert recipe.heldout_stretch == recipe.data.block_size
        extend: Any = {"block_size": 4 * recipe.data.block_size}
        branch = recipe.branch.model_validate({**recipe.branch.model_dump(), "extend": extend})
        assert (
            recipe.model_copy(update={"branch": branch}).heldout_stretch
            == 4 * recipe.data.block_size
        )
