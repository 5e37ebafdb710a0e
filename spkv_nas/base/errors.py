"""The one exception type whose message is meant for the person at the keyboard."""

from __future__ import annotations

MOST_CHARACTERS = 900  # of a message: what a hostile file holds must not fill the screen


class UserError(ValueError):
    """A mistake in what the user gave (a file, a flag, a model), said in one to three lines.

    The message states what is wrong, where, and what to do. The command line prints it without a traceback and
    exits 2; from Python it is an ordinary ``ValueError``. Control characters in it, which could drive a terminal, are
    shown as escapes, and of a very long one the middle is left out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(printable(shortened(message, 2 * MOST_CHARACTERS)), MOST_CHARACTERS))


def printable(text: str) -> str:
    """``text`` with every character that is not to be seen, line breaks and blanks aside, as an escape."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii") for one in text
    )


def shortened(text: str, most: int) -> str:
    """``text``, or its beginning and its end in ``most`` characters."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 5]} ... {text[-end:]}"


def first_line(error: BaseException) -> str:
    """What an error of a library says, in its first line and, where that ends in a colon, those that it introduces; its
    type where it says nothing.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()]
    end = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    if end > 1:  # a list: up to the next blank line
        end = next((number for number, line in enumerate(lines) if number >= end and not line), len(lines))
    return " ".join(lines[:end]) or type(error).__name__
