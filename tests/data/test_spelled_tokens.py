"""Test that documents end where they ended in their source, whatever tokens their text spells or contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import spkv_nas
from spkv_nas.base.special_tokens import encode_text
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample_blocks import RulerBlocks
from spkv_nas.data.splits import load_text
from spkv_nas.data.tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, encode, train_bpe
from spkv_nas.model import loss
from spkv_nas.training.corpus import BlockDataset

SIZE = 64
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "far",
    "away",
    "over",
    "the",
    "hills",
]
PLAIN = [f"{number} " + " ".join(WORDS[: 5 + number % 11]) for number in range(48)]
SPELLED = [text.replace(" the", f" {END_OF_TEXT}the{BEGIN_OF_TEXT}") for text in PLAIN]
SEPARATORS = ["eos", "bos", "eos+bos"]


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerBase:
    return train_bpe(PLAIN, 300, bos=True)


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    """Return a tokenizer whose vocabulary of whole words holds its special tokens, so that text gives their ids."""
    vocabulary = [
        "<unk>",
        "<s>",
        "</s>",
        *sorted({word for text in PLAIN for word in text.split()}),
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(vocabulary)}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def with_ids(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return texts that contain the ids of special tokens, however they are encoded."""
    texts = [text.replace(" the", " <s> the </s>") for text in PLAIN]
    assert {1, 2} <= {*encode([texts[9]], tokenizer)[0].tolist()}
    return texts


def num_starts(blocks: TokenBlocks) -> int:
    """Return the number of documents, or parts of documents, in the blocks."""
    marked = blocks.marked()
    is_start = blocks.boundaries.positions(marked) == 0
    return int((is_start & ~blocks.boundaries.is_filling(marked)).sum())


def num_runs(blocks: TokenBlocks) -> int:
    """Return the number of runs of tokens of one document in the blocks."""
    return blocks.num_blocks + int((np.diff(blocks.document, axis=1) != 0).sum())


def test_spelled_tokens_are_text(bpe: PreTrainedTokenizerBase) -> None:
    special = {*bpe.all_special_ids}
    assert special & {*bpe(SPELLED[5])["input_ids"][1:]}, (
        "by default the tokenizer reads them as special tokens"
    )
    for ids, text in zip(encode(SPELLED, bpe), SPELLED, strict=True):
        assert not special & {*ids.tolist()}
        assert bpe.decode(ids) == text
    assert encode(PLAIN, bpe)[3].tolist() == bpe(PLAIN[3], add_special_tokens=False)["input_ids"]


def test_tokenizers_that_never_read_special_tokens_need_no_option() -> None:
    """Tokenizers of mistral-common refuse the option."""

    class Refusing:
        def __call__(
            self, texts: Any, *, add_special_tokens: bool, verbose: bool
        ) -> dict[str, Any]:
            return {"input_ids": [len(text) for text in texts]}

    Refusing.__module__ = "transformers.tokenization_mistral_common"
    assert encode_text(["ab"], Refusing())["input_ids"] == [2]  # type: ignore[arg-type]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_separate_documents_are_divided_where_they_end(
    words: PreTrainedTokenizerBase, separator: str
) -> None:
    options: Any = {"block_size": SIZE, "separator": separator, "documents": "separate"}
    blocks = build_blocks(with_ids(words), words, **options)
    assert num_starts(blocks) == num_runs(blocks)
    for changed in (
        blocks.in_random_order(0),
        blocks.part(np.arange(1, blocks.num_blocks)),
        blocks.and_(blocks),
    ):
        assert num_starts(changed) == num_runs(changed)
    longer = blocks.cut(2 * SIZE)
    filling = int(longer.boundaries.is_filling(longer.marked()).sum())
    assert num_runs(longer) <= num_starts(longer) <= num_runs(longer) + filling


@pytest.mark.parametrize("separator", SEPARATORS)
@torch.inference_mode()
def test_joined_documents_score_all_their_tokens(
    words: PreTrainedTokenizerBase, separator: str
) -> None:
    """Only what is put before a text is not scored, not the same tokens inside of it."""
    model = tiny_model(vocab_size=len(words))
    blocks = build_blocks(with_ids(words), words, SIZE, separator=separator)
    tokens = torch.from_numpy(blocks.tokens.astype(np.int64))
    losses = loss.token_nll(model, tokens).double().numpy()
    # Opening tokens stand before a document's first token, and with "bos" after the last one of the document before
    is_opening = np.zeros(blocks.tokens.shape, dtype=bool)
    if "bos" in separator:
        is_opening[:, :-1] = np.diff(blocks.document, axis=1) != 0
        is_last = blocks.document[:-1, -1] != blocks.document[1:, 1]
        # A block that ends with its document
        is_opening[:-1, -1] |= is_last & (blocks.tokens[:-1, -1] == 1)
        is_opening[-1, -1] |= bool(blocks.begins_text()[-1, -1])
    scored = ~is_opening[:, 1:]
    nll = spkv_nas.evaluate(model, blocks).nll
    assert nll.num_tokens.sum() == scored.sum()
    assert nll.mean == pytest.approx(losses[scored].mean(), rel=1e-5)
    labels = np.stack([item["labels"].numpy() for item in BlockDataset(blocks)])
    assert int((labels[:, 1:] != loss.NO_TARGET).sum()) == scored.sum()


@pytest.mark.parametrize("documents", ["separate", "joined"])
def test_files_keep_where_documents_end(
    words: PreTrainedTokenizerBase, tmp_path: Path, documents: str
) -> None:
    texts = with_ids(words)
    (tmp_path / "text").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / f"text/{number:02}.txt").write_text(text)
    build: Any = {"block_size": SIZE, "separator": "eos+bos", "documents": documents}
    expected = build_blocks(texts, words, **build)
    assert expected.begins is not None
    for limit in (None, None, 10 * SIZE, 10 * SIZE):  # from the text, and from the cache
        found = load_text(
            [str(tmp_path / "text")], words, tmp_path / "cache", Path(), max_tokens=limit, **build
        )
        assert found.begins is not None
        if limit is None:
            assert np.array_equal(found.begins, expected.begins)
        assert documents == "joined" or num_starts(found) == num_runs(found)


def test_samples_are_divided_where_they_end(bpe: PreTrainedTokenizerBase) -> None:
    """RULER's samples contain the token after them."""
    token = "Ġthe"
    options: Any = {"separator": token, "documents": "separate"}
    boundaries = build_blocks(PLAIN, bpe, SIZE, **options).boundaries
    samples = RulerBlocks(
        bpe, 2048, ("niah_single_1",), (600,), True, 0, Material(None), boundaries
    )
    tokens, _ = samples.block(0)
    plain = np.maximum(tokens, ~tokens)
    assert int((plain == bpe.convert_tokens_to_ids(token)).sum()) > 3
    blocks = samples.held_out(2)
    for each in (tokens[None], blocks.marked()):
        positions = boundaries.positions(each)
        is_start = (positions == 0) & ~boundaries.is_filling(each)
        assert is_start.sum(1).tolist() == [3] * len(each)
