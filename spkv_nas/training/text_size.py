"""How much text there is, before it is cut into blocks; of a large text a part is counted, enough to plan by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.data.config import DataConfig, SourceConfig
from spkv_nas.data.sources import documents
from spkv_nas.data.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 20_000_000  # that are counted
_TOGETHER = 64  # documents that are tokenised at once


@dataclass(frozen=True)
class TextSize:
    """Documents and tokens of a text, separators among them.

    ``is_whole`` is False where only the first ``MOST_CHARACTERS`` were counted.
    """

    documents: int
    tokens: int
    is_whole: bool = True

    def heldout(self, config: DataConfig) -> int:
        """Tokens held out, about: which documents they are depends on their hashes."""
        return min(round(config.heldout * self.tokens), config.max_heldout_tokens)

    def training(self, config: DataConfig) -> int:
        """Tokens to train on, about."""
        return round((1 - config.heldout) * self.tokens)


def count_text(sources: Iterable[str | SourceConfig], base: Path, tokenizer: PreTrainedTokenizerBase) -> TextSize:
    """The size of a text; relative paths start from ``base``. Raises ``UserError`` for a source that is not there."""
    found = documents(sources, base)
    number = tokens = characters = 0
    while characters < MOST_CHARACTERS:
        texts = [document.text for document in islice(found, _TOGETHER)]
        if not texts:
            return TextSize(number, tokens)
        number += len(texts)
        tokens += sum(len(ids) + 1 for ids in encode(texts, tokenizer))
        characters += sum(map(len, texts))
    return TextSize(number, tokens, is_whole=False)
