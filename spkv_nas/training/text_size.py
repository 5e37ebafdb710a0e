"""Size of a recipe's text, estimated from a prefix if the text is large, for planning."""

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

MAX_CHARACTERS = 20_000_000  # maximum number of characters to count
_BATCH = 64  # documents per tokenizer call


@dataclass(frozen=True)
class TextSize:
    """Number of documents and tokens of a text."""

    documents: int  # number of documents
    tokens: int  # number of tokens, including separators
    is_whole: bool = True  # False if only the first MAX_CHARACTERS characters were counted

    def heldout(self, config: DataConfig) -> int:
        """Return the approximate number of held-out tokens; documents are held out by their hash."""
        return min(round(config.heldout * self.tokens), config.max_heldout_tokens)

    def training(self, config: DataConfig) -> int:
        """Return the approximate number of training tokens."""
        return round((1 - config.heldout) * self.tokens)


def count_text(sources: Iterable[str | SourceConfig], base: Path, tokenizer: "PreTrainedTokenizerBase") -> TextSize:
    """Count the documents and tokens of a text, up to ``MAX_CHARACTERS`` characters; paths start from ``base``.

    Raises ``UserError``: a source does not exist.
    """
    remaining = documents(sources, base)
    number = tokens = characters = 0
    # Tokenize batch by batch, until the text ends or enough is read
    while characters < MAX_CHARACTERS:
        texts = [document.text for document in islice(remaining, _BATCH)]
        if not texts:
            return TextSize(number, tokens)
        number += len(texts)
        tokens += sum(len(ids) + 1 for ids in encode(texts, tokenizer))
        characters += sum(map(len, texts))
    return TextSize(number, tokens, is_whole=False)
