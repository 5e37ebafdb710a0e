"""Token blocks: documents concatenated and cut into blocks of equal length, with the document of each token."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.defaults import BLOCK_SIZE
from spkv_nas.base import errors, files
from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.base.comparison import ComparedByValue
from spkv_nas.data import config, sources
from spkv_nas.data.tokenizer import PLAIN, Boundaries, SeparateDocuments, boundaries, unmarked

if TYPE_CHECKING:
    from hashlib import _Hash as Digest

    from transformers import PreTrainedTokenizerBase

REMEDY = "remove it: the text is then tokenised again"
_INT32 = 2**31 - 1  # largest token or index
_OPEN_BLOCKS = 64  # that wait for short documents to fill them
_GOLDEN_RATIO = (1 + 5**0.5) / 2
_ALL = slice(None)
_ARRAYS = (
    Array("tokens", "whole", "N T", high=_INT32),
    Array("document", "whole", "N T", high=_INT32),
    Array("begins", "whole", "N T", high=1),
    Array("documents", "text"),
)


@dataclass(frozen=True)
class DocumentInfo:
    """Describe a document once it is tokenised."""

    id: str  # identity of its text
    domain: str  # its domain
    name: str  # name to show
    whole: str = ""  # identity of the text that it is a piece of; empty for a whole text

    @property
    def text_id(self) -> str:
        """Return 16 digits that identify the whole text, which do not depend on whether and where it was cut."""
        return (self.whole or self.id)[:16]

    @classmethod
    def of(cls, document: sources.Document) -> "DocumentInfo":
        """Return the information on a document."""
        return cls(document.id, document.domain, document.label, document.whole)


@dataclass(frozen=True, eq=False, repr=False)
class TokenBlocks(ComparedByValue):
    """``N`` blocks of ``T`` tokens; arrays may be memory-mapped files (``block_files``), read only where used."""

    tokens: NDArray[np.int32]  # int32 [N, T]
    # int32 [N, T], index into ``documents`` of each token's document. A separator belongs to the document that it ends,
    # and an opening token to the document of the first token after it
    document: NDArray[np.int32]
    documents: Collection[DocumentInfo]  # the documents, in the order of their tokens
    largest: int | None = None  # the largest token, if it is known without reading the tokens
    # Tokens that every block begins with, before its text, and those between documents
    boundaries: Boundaries = PLAIN
    # bool [N, T], which tokens begin a text: opening tokens, filling, and the first token of separate documents without
    # opening tokens. None for blocks that were made elsewhere, where the ids of special tokens tell it
    begins: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self.num_blocks

    def __repr__(self) -> str:
        """Return the sizes on one line."""
        return (
            f"{self.num_blocks:,} blocks of {self.block_size:,} "
            f"tokens from {len(self.documents):,} documents"
        )

    @property
    def opening(self) -> tuple[int, ...]:
        """Return the tokens that every block begins with, before its text; they begin a text, and are not scored."""
        return self.boundaries.opening

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks N."""
        return int(self.tokens.shape[0])

    @property
    def block_size(self) -> int:
        """Return the number of tokens per block T."""
        return int(self.tokens.shape[1])

    def marked(self, rows: NDArray[np.integer] | slice | int = _ALL) -> NDArray[np.int32]:
        """Return the tokens [.., T] of some blocks, with the first of each separate document marked.

        Marked tokens are what the methods of ``boundaries`` take (``tokenizer.unmarked``).
        """
        tokens = self.tokens[rows]
        if self.begins is None:
            return tokens
        return self.boundaries.with_starts(tokens, self.begins[rows])

    def begins_text(self, rows: NDArray[np.integer] | slice | int = _ALL) -> NDArray[np.bool_]:
        """Return which tokens [.., T] of some blocks begin a text, each first one aside: they are not predicted."""
        marked = self.marked(rows)
        if self.begins is None:
            return self.boundaries.begins_text(marked)
        begins: NDArray[np.bool_] = self.begins[rows] | (self.boundaries.positions(marked) == 0)
        begins[..., 0] = False
        return begins

    @property
    def own_context(self) -> NDArray[np.int64]:
        """Return how many tokens of its own document are before each predicted token in its block [tokens].

        Only these are evidence on what a model reads from afar: tokens of other documents say little about a token.
        """
        columns = np.arange(self.block_size)
        is_new = np.diff(self.document, axis=1, prepend=-1) != 0
        starts = np.maximum.accumulate(np.where(is_new, columns, 0), axis=1)
        positions = self.boundaries.positions(self.marked())
        before = np.minimum(columns - starts, positions)
        is_predicted = (columns > 0) & ~self.begins_text()
        return before[is_predicted]

    @property
    def largest_token(self) -> int:
        """Return the largest token; 0 for an empty text."""
        return int(self.tokens.max(initial=0)) if self.largest is None else self.largest

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Return the domains of the documents, sorted."""
        return tuple(sorted({document.domain for document in self.documents}))

    @property
    def present(self) -> list[DocumentInfo]:
        """Return the documents that the blocks have tokens of."""
        infos = tuple(self.documents)
        return [infos[index] for index in np.unique(self.document)]

    @property
    def text_ids(self) -> frozenset[str]:
        """Return the identities of the texts that the blocks have tokens of (``DocumentInfo.text_id``)."""
        return frozenset(info.text_id for info in self.present)

    def feed(self, key: "Digest") -> None:
        """Update a hash with the ids of all documents and the number of tokens, which identify the text."""
        key.update(str(self.tokens.shape).encode())
        for document in self.documents:  # one by one, as there may be millions
            key.update(f" {document.id}".encode())
        key.update(f" {self.boundaries}".encode())

    def take(self, num_blocks: int) -> "TokenBlocks":
        """Return the first ``num_blocks`` blocks."""
        return self.part(slice(num_blocks))

    def spread(self, num_blocks: int) -> "TokenBlocks":
        """Select ``num_blocks`` blocks, or all, from as many documents as possible, in text order.

        One block of every document is taken before a second one of any: the first block of a separate document, which
        is how it reaches a model, and a middle one of a joined document. A block counts for the document of its middle
        token.
        """
        if num_blocks >= self.num_blocks:
            return self
        # Rank each block within its document
        is_separate = isinstance(self.boundaries, SeparateDocuments)
        middle = self.document[:, self.block_size // 2]
        _, owners, counts = np.unique(middle, return_inverse=True, return_counts=True)
        rank = np.empty(self.num_blocks, dtype=np.int64)
        by_owner = np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])
        for blocks in by_owner:
            order = np.arange(len(blocks)) if is_separate else spread_order(len(blocks), 0.5)
            rank[blocks[order]] = np.arange(len(blocks))
        # Take whole rounds, and of the last one blocks that are evenly spread over the text
        per_round = np.bincount(rank)
        last_round = int(np.searchsorted(np.cumsum(per_round), num_blocks))
        missing = num_blocks - int(per_round[:last_round].sum())
        candidates = np.flatnonzero(rank == last_round)
        some = candidates[np.arange(missing) * len(candidates) // max(missing, 1)]
        chosen = np.concatenate([np.flatnonzero(rank < last_round), some])
        return self.part(np.sort(chosen))

    def part(self, blocks: NDArray[np.intp] | slice) -> "TokenBlocks":
        """Return the blocks with some indices."""
        begins = None if self.begins is None else self.begins[blocks]
        return replace(
            self,
            tokens=self.tokens[blocks],
            document=self.document[blocks],
            largest=None,
            begins=begins,
        )

    def nested(self, ends: Sequence[int]) -> "list[TokenBlocks]":
        """Divide the blocks into disjoint parts: the first ``ends[0]``, those up to ``ends[1]``, and so on.

        They follow an order in which every prefix is evenly spread over the text (``spread_order``).
        """
        order = spread_order(self.num_blocks)
        return [self.part(np.sort(order[start:end])) for start, end in pairwise((0, *ends))]

    def and_(self, other: "TokenBlocks") -> "TokenBlocks":
        """Append the blocks of another text, of the same length and with the same opening tokens."""
        begins = None
        if self.begins is not None and other.begins is not None:
            begins = np.concatenate([self.begins, other.begins])
        return TokenBlocks(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.document, other.document + len(self.documents)]),
            (*self.documents, *other.documents),
            boundaries=self.boundaries,
            begins=begins,
        )

    def cut(self, block_size: int) -> "TokenBlocks":
        """Return the text in other blocks, without an incomplete last one; with opening tokens it is copied."""
        tokens, document, begins = self._without_openings()
        if isinstance(self.boundaries, SeparateDocuments):
            # A document loses its opening tokens at the start of a block that is now inside of another
            is_new = (np.diff(document) != 0) & ~begins[:-1]
            begins = np.concatenate([begins[:1], begins[1:] | is_new])
        tokens, document, begins = _in_blocks(tokens, document, begins, block_size, self.opening)
        return replace(self, tokens=tokens, document=document, begins=begins)

    def in_random_order(self, seed: int, left_out: Collection[str] = ()) -> "TokenBlocks":
        """Return the text, except the texts ``left_out`` with all their pieces, with its documents in random order.

        The order depends on the seed and on the documents, not on their order. Blocks are copied into memory. Raises
        ``UserError`` if less than one block is left.
        """
        infos = tuple(self.documents)
        tokens, document, begins = self._without_openings()
        tokens = np.where(begins, ~tokens, tokens)
        # Gather the tokens of each document
        order = np.argsort(document, kind="stable")
        present, starts = np.unique(document[order], return_index=True)
        texts = dict(zip(present.tolist(), np.split(tokens[order], starts[1:]), strict=True))
        texts = {index: self.boundaries.without_filling(text) for index, text in texts.items()}
        # Draw the order of the documents, which is their new index
        kept = [index for index in texts if infos[index].text_id not in left_out]
        kept.sort(key=lambda index: infos[index].id)
        order = np.random.default_rng(seed).permutation(len(kept))
        shuffled = [kept[index] for index in order]
        pieces = [(texts[index], number) for number, index in enumerate(shuffled)]
        shuffled_infos = [infos[index] for index in shuffled]
        return packed(pieces, shuffled_infos, self.block_size, "text", self.boundaries)

    def _known_begins(self) -> NDArray[np.bool_]:
        """Return which tokens [N, T] begin a text, from their ids in blocks that were made elsewhere."""
        return self.begins_text() if self.begins is None else self.begins

    def _without_openings(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
        """Return tokens, documents and beginnings, each [tokens], without the tokens that every block begins with."""
        first = len(self.opening)
        tokens = self.tokens[:, first:].reshape(-1)
        document = self.document[:, first:].reshape(-1)
        begins = self._known_begins()[:, first:].reshape(-1)
        return tokens, document, begins

    def save(self, path: Path) -> None:
        """Write the blocks and their documents as ``.npz``, atomically."""
        infos = json.dumps([asdict(info) for info in self.documents])
        arrays: dict[str, NDArray[Any]] = {
            "tokens": self.tokens,
            "document": self.document,
            "begins": self._known_begins().astype(np.uint8),
            "documents": np.array(infos),
        }
        files.write_npz(path, arrays, compressed=False)

    @classmethod
    def read(cls, path: Path, boundaries: Boundaries = PLAIN) -> "TokenBlocks":
        """Read a file written by ``save``, which does not record the boundaries; ``UserError`` if it is damaged."""
        arrays = read_arrays(path, _ARRAYS, REMEDY)
        try:
            infos = tuple(DocumentInfo(**info) for info in json.loads(str(arrays["documents"])))
        except (ValueError, TypeError, RecursionError):
            infos = ()
        is_text = all(isinstance(value, str) for info in infos for value in astuple(info))
        if not is_text or arrays["document"].max() >= len(infos):
            raise errors.UserError(
                f"{path} is damaged: its documents do not match its tokens\n{REMEDY}"
            )
        return cls(
            arrays["tokens"].astype(np.int32, copy=False),
            arrays["document"].astype(np.int32, copy=False),
            infos,
            boundaries=boundaries,
            begins=arrays["begins"].astype(np.bool_),
        )


def build_blocks(
    texts: Iterable[str | sources.Document],
    tokenizer: "PreTrainedTokenizerBase",
    block_size: int = BLOCK_SIZE,
    max_tokens: int | None = None,
    bos: config.Bos = config.AUTO,
    separator: str = config.AUTO,
    documents: str = config.JOINED,
) -> TokenBlocks:
    """Tokenise texts and pack them into blocks, with a separator after each text.

    A text of at least a block fills blocks of its own; what is left of it shares blocks with shorter texts. The last
    block is left out if it is not full.

    Args:
        texts: strings or documents. Long ones are cut into pieces that serve as documents, and all are if they are few
            (``sources.in_pieces``).
        tokenizer: tokenizer of the model.
        block_size: tokens per block.
        max_tokens: stop after the document that reaches this many tokens.
        bos: whether every block begins with a BOS token, see ``tokenizer.boundaries``.
        separator: "none", "eos", "bos", "eos+bos" or another token of the vocabulary. "auto" is a convention
            (``tokenizer.default_separator``): ``measure_separator`` finds the one that a model was trained with.
        documents: "joined", or "separate": tokens see only their own document, in which positions start again. One
            that is shorter than a block is not cut; one that continues from the block before starts anew in its block.

    Raises ``UserError``: if there is no document, or fewer tokens than one block.
    """
    limits = boundaries(tokenizer, separator, bos, block_size, documents)
    pieces: list[tuple[NDArray[np.int32], int]] = []
    infos: list[DocumentInfo] = []
    num_tokens = 0
    # Tokenise documents up to the limit
    texts_read = sources.as_documents(texts, block_size)
    for document, ids in sources.tokenised(texts_read, tokenizer, limits):
        if max_tokens is not None and num_tokens >= max_tokens:
            break
        pieces.append((ids, len(infos)))
        infos.append(DocumentInfo.of(document))
        num_tokens += len(ids)
    return packed(pieces, infos, block_size, "text", limits)


def packed(
    pieces: Sequence[tuple[NDArray[np.int32], int]],
    infos: Sequence[DocumentInfo],
    block_size: int,
    what: str,
    boundaries: Boundaries = PLAIN,
    stretch: int | None = None,
) -> TokenBlocks:
    """Pack ``pieces``, tokens int32 [tokens] with the index in ``infos`` of their document, into blocks.

    Tokens that begin a text are marked (``Boundaries.ended``).

    An incomplete last block is left out; ``what`` names the text in the ``UserError`` if it does not fill a block.
    ``stretch`` tokens of text of one piece stay together, a multiple of a block's; by default, as many as a block has.
    """
    opening = boundaries.opening
    text_size = block_size - len(opening)
    if isinstance(boundaries, SeparateDocuments):
        parts = list(uncut(pieces, text_size, boundaries))
    else:
        parts = list(aligned(pieces, stretch or text_size, boundaries.separator))
    sizes = [len(part) for part, _ in parts]
    check_enough(len(infos), len(opening) + sum(sizes), block_size, what)
    marked = np.concatenate([part for part, _ in parts])
    owners = np.array([document for _, document in parts], dtype=np.int32).repeat(sizes)
    tokens, document, begins = _in_blocks(unmarked(marked), owners, marked < 0, block_size, opening)
    return TokenBlocks(tokens, document, tuple(infos), boundaries=boundaries, begins=begins)


def aligned(
    pieces: Iterable[tuple[NDArray[np.int32], int]], size: int, separator: tuple[int, ...] = ()
) -> Iterator[tuple[NDArray[np.int32], int]]:
    """Yield pieces of documents in an order in which few blocks hold more than one document.

    Whole multiples of ``size`` tokens of a piece start at a multiple of ``size``; what is left of it waits until other
    short pieces fill a stretch with it. A separator is left out where it would begin a stretch.
    """
    waiting: list[tuple[NDArray[np.int32], int]] = []
    num_waiting = 0
    for tokens, owner in pieces:
        # Yield whole stretches at once
        whole = len(tokens) // size * size
        if whole:
            yield tokens[:whole], owner
        rest = tokens[whole:]
        # Fill stretches with the rest, without a separator that would begin one
        while len(rest):
            if not num_waiting and _ends(separator, rest):
                break
            missing = size - num_waiting
            part = rest[:missing]
            rest = rest[missing:]
            waiting.append((part, owner))
            num_waiting += len(part)
            if num_waiting == size:
                yield from waiting
                waiting = []
                num_waiting = 0
    yield from waiting


def _ends(separator: tuple[int, ...], tokens: NDArray[np.int32]) -> bool:
    """Return whether a separator ends with these tokens, one at least."""
    number = len(tokens)
    return number <= len(separator) and tuple(unmarked(tokens)) == separator[-number:]


def uncut(
    pieces: Iterable[tuple[NDArray[np.int32], int]], size: int, boundaries: SeparateDocuments
) -> Iterator[tuple[NDArray[np.int32], int]]:
    """Yield pieces of separate documents in an order in which blocks of ``size`` tokens cut none that is shorter.

    What is left of a piece beyond whole blocks goes to the fullest open block that has room. Closed blocks are filled
    with the last token of the separator, marked, as it is not predicted; one that is less than half full comes last,
    unfilled.
    """
    blocks: list[list[tuple[NDArray[np.int32], int]]] = []
    rooms: list[int] = []  # number of free tokens in each open block

    def filled(index: int) -> list[tuple[NDArray[np.int32], int]]:
        block = blocks.pop(index)
        room = rooms.pop(index)
        return [*block, (np.full(room, boundaries.filling, dtype=np.int32), block[-1][1])]

    for tokens, owner in pieces:
        # Yield whole blocks at once
        whole = len(tokens) // size * size
        if whole:
            yield tokens[:whole], owner
        rest = boundaries.begun(tokens[whole:])
        if len(rest) <= len(boundaries.separator):
            continue
        # Put the rest where it leaves the least room
        fitting = [index for index, room in enumerate(rooms) if room >= len(rest)]
        if not fitting:
            if len(blocks) == _OPEN_BLOCKS:
                yield from filled(int(np.argmin(rooms)))
            fitting = [len(blocks)]
            blocks.append([])
            rooms.append(size)
        best = min(fitting, key=rooms.__getitem__)
        blocks[best].append((rest, owner))
        rooms[best] -= len(rest)
    while blocks and min(rooms) <= size // 2:
        yield from filled(int(np.argmin(rooms)))
    yield from chain(*blocks)


def _in_blocks(
    tokens: NDArray[np.int32],
    owner: NDArray[np.int32],
    begins: NDArray[np.bool_],
    block_size: int,
    opening: tuple[int, ...],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    """Cut tokens, their documents, and which begin a text, into blocks [N, block_size] that begin with the opening."""
    size = block_size - len(opening)  # text of a block
    num_blocks = len(tokens) // size

    def cut(values: NDArray[Any]) -> NDArray[Any]:
        return values[: num_blocks * size].reshape(num_blocks, size)

    tokens = cut(tokens)
    owner = cut(owner)
    begins = cut(begins)
    if not opening:
        return tokens, owner, begins
    # Insert the opening tokens
    first = np.tile(np.array(opening, dtype=np.int32), (num_blocks, 1))
    tokens = np.hstack([first, tokens])
    owner = np.hstack([owner[:, :1].repeat(len(opening), 1), owner])
    begins = np.hstack([np.ones(first.shape, dtype=np.bool_), begins])
    return tokens, owner, begins


def spread_order(number: int, offset: float = 0.0) -> NDArray[np.intp]:
    """Order the items 0 to ``number`` - 1 so that every prefix of the order is evenly spread over them.

    Items are sorted by the fractional part of ``offset`` plus their index times the golden ratio.
    """
    fractions = (np.arange(number) * _GOLDEN_RATIO + offset) % 1.0
    return np.argsort(fractions)


def check_enough(num_documents: int, num_tokens: int, block_size: int, what: str) -> None:
    """Raise ``UserError`` if a text has no document or less than one block of tokens."""
    if not num_documents:
        raise errors.UserError(f"the {what} is empty: no document in any source")
    if num_tokens < block_size:
        raise errors.UserError(
            f"the {what} has {num_tokens} tokens, fewer than one block of {block_size}\n"
            "use more text, or shorter blocks (--context; "
            "data.block_size in a recipe; block_size in Python)"
        )
