"""Whole numbers in few letters, for the page's data: exponential-Golomb codes, six bits to a letter of base64url.

A number n >= 0 of order k is n + 2^k in binary, after as many zeros as it has digits more than k + 1. That is short for
numbers of about 2^k, and of any size no longer than twice the number itself. ``codes.js`` reads it.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


class Code:
    """A text that grows by the numbers that are put into it."""

    def __init__(self) -> None:
        self._bits: list[str] = []

    def put(self, number: int, order: int) -> None:
        """One number, not below 0."""
        digits = f"{number + (1 << order):b}"
        self._bits.append("0" * (len(digits) - 1 - order) + digits)

    def run(self, numbers: Sequence[int], orders: Sequence[int]) -> list[int]:
        """Numbers by how far they lie above the least, each of an order of its own; the orders of others like them."""
        least = min(numbers)
        self.put(zigzag(least), 0)
        for number, order in zip(numbers, orders, strict=True):
            self.put(number - least, order)
        return [(number - least).bit_length() for number in numbers]

    def flags(self, flags: Iterable[bool]) -> None:
        """A bit for each."""
        self._bits.extend("01"[flag] for flag in flags)

    @property
    def text(self) -> str:
        """Everything so far; the last letter is filled up with zeros."""
        bits = "".join(self._bits)
        bits += "0" * (-len(bits) % 6)
        return "".join(_LETTERS[int(bits[at : at + 6], 2)] for at in range(0, len(bits), 6))


def zigzag(number: int) -> int:
    """0, 1, -1, 2, -2, ... as 0, 1, 2, 3, 4."""
    return 2 * number - 1 if number > 0 else -2 * number
