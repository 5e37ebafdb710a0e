"""Check how much of a text is evidence on distant tokens, and the length that is chosen for it."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from spkv_nas.data.blocks import build_blocks
from spkv_nas.data.context import FAR_SHARE, SHORTEST, far_share, supported_context
from spkv_nas.data.sources import Document


def document(number: int, words: int) -> Document:
    """Return a document of about ``words`` words, which begins with its number."""
    return Document(
        f"{number} " + " ".join(f"w{number * 7 + word}" for word in range(words)),
        "text",
        f"{number}",
    )


class TestOwnContext:
    @pytest.mark.parametrize("documents", ["joined", "separate"])
    def test_only_tokens_of_the_same_document_count(
        self, documents: str, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        texts = [document(number, 12) for number in range(30)]
        blocks = build_blocks(texts, tiny_tokenizer, 64, separator="eos", documents=documents)
        before = blocks.own_context
        # By hand: count back to the first token of another document, or to the beginning of the block
        expected = []
        begins = blocks.begins_text()
        for row in range(blocks.num_blocks):
            for column in range(1, 64):
                if begins[row, column]:
                    continue
                back = 0
                while (
                    back < column
                    and blocks.document[row, column - back - 1] == blocks.document[row, column]
                ):
                    back += 1
                expected.append(back)
        assert before.tolist() == expected
        assert 0 < max(expected) < 63, "documents are shorter than a block, so none sees all of it"

    def test_a_document_that_goes_on_starts_anew(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        blocks = build_blocks(
            [document(0, 600)], tiny_tokenizer, 64, separator="eos", documents="separate"
        )
        assert (
            blocks.own_context.reshape(blocks.num_blocks, -1).max(1).tolist()
            == [63] * blocks.num_blocks
        )


class TestFarShare:
    def test_counts_tokens_in_the_farther_half(self) -> None:
        assert far_share([100], 100) == 0.5
        # Two whole sequences, and 50 tokens that see less than half
        assert far_share([250], 100) == 100 / 250
        assert far_share([30, 70], 100) == 20 / 100
        assert far_share([], 100) == 0.0


class TestSupportedContext:
    def lengths(self, texts: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        return [len(tokenizer(text.text, add_special_tokens=False)["input_ids"]) for text in texts]

    def test_long_documents_take_the_longest(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        texts = [document(number, 2000) for number in range(5)]
        assert min(self.lengths(texts, tiny_tokenizer)) > 1000
        assert supported_context(texts, tiny_tokenizer, 1000) == 1000

    def test_short_documents_take_a_power_of_two_of_which_they_have_enough(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        texts = [document(number, 60) for number in range(40)]
        lengths = self.lengths(texts, tiny_tokenizer)
        chosen = supported_context(texts, tiny_tokenizer, 4096)
        assert chosen in (128, 256, 512, 1024)
        assert far_share(lengths, chosen) >= FAR_SHARE > far_share(lengths, 2 * chosen)

    def test_single_words_take_the_shortest(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        texts = [Document(f"w{number}", "text", f"{number}") for number in range(300)]
        assert supported_context(texts, tiny_tokenizer, 2048) == SHORTEST
        assert supported_context(texts, tiny_tokenizer, 64) == 64, "the model's context is shorter"


def test_beginnings_come_first_of_separate_documents(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """As a model reads them; packed documents are represented by what is in their middle."""
    texts = [document(number, 300) for number in range(4)]
    blocks = build_blocks(texts, tiny_tokenizer, 64, separator="eos", documents="separate")
    firsts = {text.text[:2].strip() for text in texts}
    chosen = blocks.spread(4)
    begun = {tiny_tokenizer.decode(row[:8])[:2].strip() for row in chosen.tokens}
    assert begun == firsts
    joined = build_blocks(texts, tiny_tokenizer, 64, separator="eos").spread(4)
    assert not np.array_equal(joined.tokens, chosen.tokens)
