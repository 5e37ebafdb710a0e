"""Code integers as text for the page's data: exponential-Golomb codes, six bits per base64url letter.

A number n >= 0 of order k is n + 2^k in binary, preceded by as many zeros as it has digits more than k + 1. That is
short for numbers near 2^k, and never longer than about twice the number's digits. ``codes.js`` decodes it.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


class Code:
    """A growing coded text."""

    def __init__(self) -> None:
        """Start with an empty text."""
        self._bits: list[str] = []

    def put(self, number: int, order: int) -> None:
        """Append one number >= 0 with the given order."""
        digits = f"{number + (1 << order):b}"
        self._bits.append("0" * (len(digits) - 1 - order) + digits)

    def run(self, numbers: Sequence[int], orders: Sequence[int]) -> list[int]:
        """Append numbers as their distances from the smallest, each with its own order.

        Returns:
            The orders that suit these numbers, for the next run.
        """
        least = min(numbers)
        self.put(zigzag(least), 0)
        for number, order in zip(numbers, orders, strict=True):
            self.put(number - least, order)
        return [(number - least).bit_length() for number in numbers]

    def flags(self, flags: Iterable[bool]) -> None:
        """Append one bit for each flag."""
        self._bits.extend("01"[flag] for flag in flags)

    @property
    def text(self) -> str:
        """Return the text so far; the last letter is padded with zero bits."""
        bits = "".join(self._bits)
        bits += "0" * (-len(bits) % 6)
        return "".join(_LETTERS[int(bits[at : at + 6], 2)] for at in range(0, len(bits), 6))


def zigzag(number: int) -> int:
    """Map the integers 0, 1, -1, 2, -2, ... to 0, 1, 2, 3, 4, ..."""
    return 2 * number - 1 if number > 0 else -2 * number
