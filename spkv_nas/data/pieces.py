"""Cut long texts into pieces that serve as documents.

A single file with a whole corpus can then be held out in part, counts as several clusters for a standard error, and is
never in memory as a whole. A piece is four blocks long at about four characters per token, so that three of four blocks
lie inside one piece, and has at least 8,192 characters: about 2,000 tokens, the length of a short article.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_BLOCKS, _CHARACTERS_PER_TOKEN = 4, 4
PIECE = 8_192  # minimum characters


def piece_size(block_size: int) -> int:
    """Return the characters per piece of a text with blocks of ``block_size`` tokens."""
    return max(PIECE, _BLOCKS * _CHARACTERS_PER_TOKEN * block_size)


def cut(chunks: Iterable[str], size: int) -> Iterator[str]:
    """Cut the text that ``chunks`` make up into pieces of at most ``size`` characters, the last of up to half more.

    The pieces do not depend on the chunk boundaries, nor on later text.
    """
    remainder = ""
    for chunk in chunks:
        text, start = remainder + chunk, 0
        while len(text) - start > size + size // 2:
            end = end_of_piece(text, start, size)
            yield text[start:end]
            start = end
        remainder = text[start:]
    yield remainder


def end_of_piece(text: str, start: int, size: int) -> int:
    """Return where a piece that begins at ``start`` ends.

    In its second half it ends after a paragraph, else after a line, else before a space; otherwise after ``size``
    characters.
    """
    middle, end = start + size // 2, start + size
    for mark in ("\n\n", "\n"):
        position = text.rfind(mark, middle, end)
        if position >= 0:
            return position + len(mark)
    return max(text.rfind(" ", middle, end), 0) or end
