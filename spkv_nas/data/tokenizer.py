"""A byte-level BPE tokenizer trained on the corpus, for models that start from nothing; and how any tokenizer is used.

A tokenizer takes 180 bytes of memory per character while it works on a text, so long texts are given to it in pieces:
20 million characters then take 0.3 GB more than the tokens, not 3.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spkv_nas.data.pieces import end_of_piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
MOST_CHARACTERS = 1_000_000  # of a text that a tokenizer is given at once
TRAINING_PIECE = 1_000  # characters of a longer text: each merge takes time by the length of all words that have it


def pieces(text: str, most: int = MOST_CHARACTERS) -> Iterator[str]:
    """``text``, or if it has more than ``MOST_CHARACTERS`` pieces of up to ``most`` that make it up."""
    start, most = 0, len(text) if len(text) <= MOST_CHARACTERS else most
    while len(text) - start > most:
        end = end_of_piece(text, start, most)
        yield text[start:end]
        start = end
    yield text[start:]


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[NDArray[np.int32]]:
    """int32 [tokens] of each text, without special tokens. Texts of more than ``MOST_CHARACTERS`` are tokenised piece
    by piece, which may cost a merge of two tokens at every cut.
    """
    if max(map(len, texts), default=0) <= MOST_CHARACTERS:
        return _ids(texts, tokenizer)
    return [np.concatenate([_ids([piece], tokenizer)[0] for piece in pieces(text)]) for text in texts]


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[NDArray[np.int32]]:
    found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in found]


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A fast tokenizer of ``vocab_size`` entries, ``<|endoftext|>`` among them. The same texts give the same one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
