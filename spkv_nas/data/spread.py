"""Choose a limited sample of a text, spread over its documents, in one pass.

A standard error by document is only as good as the number of documents, so a sample takes one stretch of every document
before a second of any. A stretch is a whole block (or several, where blocks will be longer), so that the context of its
tokens comes from one document; shorter documents are packed together.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spkv_nas.base.arrays import Tokens
from spkv_nas.data import sources, tokenizer
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks, packed, spread_order

_LARGEST_SHARE = 0.1  # maximum share of tokens from one document, if there are enough documents
_TWICE_EVEN = 2.0  # maximum multiple of a document's even share, if there are few


class _Key(NamedTuple):
    """Order in which stretches are taken: by round, then by the hash of the document."""

    round: int
    document: str


@dataclass(frozen=True)
class _Stretch:
    """A stretch of a document's tokens, with its position and its order."""

    key: _Key
    start: int
    info: DocumentInfo
    tokens: Tokens


class SpreadSample:
    """A sample of at least ``max_tokens`` tokens, or all: stretches of the documents with the smallest hashes.

    The choice depends only on the content of the documents. Further documents can displace the last stretches, but
    never move others. Memory is proportional to the stretches kept, each of ``stretch`` tokens, a multiple of the block
    size.
    """

    def __init__(self, max_tokens: int, stretch: int) -> None:
        """Start an empty sample."""
        self._max_tokens, self._stretch = max_tokens, stretch
        self._total = 0
        self._kept: list[_Stretch] = []  # ascending by key

    def wants(self, document: sources.Document) -> bool:
        """Return True if a stretch of the document would be kept, given the documents so far."""
        return self._takes(_Key(0, document.id))

    def add(self, document: sources.Document, ids: Tokens) -> None:
        """Take stretches of a document, tokens int32 [tokens]."""
        size, info = self._stretch, DocumentInfo.of(document)
        # Cut it into whole stretches in an order spread over the document; what remains of it comes last
        num_whole = len(ids) // size
        starts = [size * int(number) for number in spread_order(num_whole, int(document.id[8:16], 16) / 2**32)]
        starts += [size * num_whole] if len(ids) > size * num_whole else []
        # Keep those that precede the last one kept, and drop what the limit no longer needs
        for number, start in enumerate(starts):
            key = _Key(number, document.id)
            if not self._takes(key):
                break
            part_tokens = ids[start : start + size].copy()
            insort(self._kept, _Stretch(key, start, info, part_tokens), key=lambda stretch: stretch.key)
            self._total += len(part_tokens)
        while self._total - len(self._kept[-1].tokens) >= self._max_tokens:
            self._total -= len(self._kept.pop().tokens)

    def blocks(
        self, block_size: int, what: str, boundaries: tokenizer.Boundaries = tokenizer.PLAIN, *, balanced: bool = False
    ) -> TokenBlocks:
        """Pack the sample into blocks, document by document in the order of their hashes; arguments as of ``packed``.

        If ``balanced``, leave out stretches of documents that would hold more than a tenth of the tokens (or twice an
        even share, if there are fewer than 20 documents).
        """
        stretches = _balanced(self._kept) if balanced else self._kept
        stretches = sorted(stretches, key=lambda stretch: (stretch.key.document, stretch.start))
        infos = {stretch.key.document: stretch.info for stretch in stretches}
        owner = {document: number for number, document in enumerate(infos)}
        pieces = [(stretch.tokens, owner[stretch.key.document]) for stretch in stretches]
        return packed(pieces, list(infos.values()), block_size, what, boundaries, self._stretch)

    def _takes(self, key: _Key) -> bool:
        """Return True if a stretch with this key would be kept."""
        return self._total < self._max_tokens or key < self._kept[-1].key


def _balanced(stretches: Sequence[_Stretch]) -> Sequence[_Stretch]:
    """Return the stretches of as many rounds as possible, at least one, without a document of too many tokens."""
    rounds = max((stretch.key.round for stretch in stretches), default=0)
    # Leave out late rounds until no document has too many tokens
    for last in range(rounds, 0, -1):
        tokens: dict[str, int] = {}
        for stretch in stretches:
            if stretch.key.round <= last:
                tokens[stretch.key.document] = tokens.get(stretch.key.document, 0) + len(stretch.tokens)
        if max(tokens.values()) <= max(_LARGEST_SHARE, _TWICE_EVEN / len(tokens)) * sum(tokens.values()):
            return [stretch for stretch in stretches if stretch.key.round <= last]
    return [stretch for stretch in stretches if stretch.key.round == 0]
