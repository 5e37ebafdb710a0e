"""Long texts cut into pieces, which serve as documents: one file of a whole corpus can be held out in part, is several
clusters to a standard error, and never is in memory as a whole.

A piece is four blocks long at about four characters per token, so that three of four blocks of it see one place of the
text alone, and at least 8,192 characters: about 2,000 tokens, as a short article has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_BLOCKS, _CHARACTERS_PER_TOKEN = 4, 4
PIECE = 8_192  # characters


def piece_size(block_size: int) -> int:
    """Characters of a piece of a text whose blocks have ``block_size`` tokens."""
    return max(PIECE, _BLOCKS * _CHARACTERS_PER_TOKEN * block_size)


def cut(chunks: Iterable[str], size: int) -> Iterator[str]:
    """The text that ``chunks`` make up, in pieces of ``size`` characters at most, the last of up to half as much again.

    The chunks do not show in the pieces, nor does what follows later in the text.
    """
    rest = ""
    for chunk in chunks:
        text, start = rest + chunk, 0
        while len(text) - start > size + size // 2:
            end = end_of_piece(text, start, size)
            yield text[start:end]
            start = end
        rest = text[start:]
    yield rest


def end_of_piece(text: str, start: int, size: int) -> int:
    """Where a piece that begins at ``start`` ends: after a paragraph, else a line, else before a blank, where its
    second half has one; after ``size`` characters otherwise.
    """
    middle, end = start + size // 2, start + size
    for mark in ("\n\n", "\n"):
        found = text.rfind(mark, middle, end)
        if found >= 0:
            return found + len(mark)
    return max(text.rfind(" ", middle, end), 0) or end
