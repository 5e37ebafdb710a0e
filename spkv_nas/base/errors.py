"""User-facing error."""

# Cause of values that are not finite, and what to do
OVERFLOW = (
    "the model's weights are damaged or diverged, "
    "or its activations overflow in its dtype: load it in float32"
)
MAX_CHARACTERS = 900  # of a message: the content of a hostile file must not fill the screen


class UserError(ValueError):
    """User-facing error: a mistake in the input (a file, a flag, a model), described in one to three lines.

    The message says what is wrong, where, and how to fix it. The command line prints it without a traceback and exits
    with code 2. Control characters, which could manipulate a terminal, are escaped, and long messages shortened.
    """

    def __init__(self, message: str) -> None:
        """Escape and shorten the message."""
        super().__init__(
            shortened(printable(shortened(message, 2 * MAX_CHARACTERS)), MAX_CHARACTERS)
        )


def printable(text: str) -> str:
    """Return ``text`` with all unprintable characters, except line breaks, as escapes."""
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def shortened(text: str, max_length: int) -> str:
    """Return ``text``, shortened in the middle to ``max_length`` characters if it is longer."""
    if len(text) <= max_length:
        return text
    end = max_length // 4
    return f"{text[: max_length - end - 5]} ... {text[-end:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error; its type before a single word, such as the key of a ``KeyError``.

    If the line ends in a colon, the lines that it introduces follow.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()]
    end = next(
        (number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines)
    )
    if end > 1:  # a list follows: up to the next blank line
        end = next(
            (number for number, line in enumerate(lines) if number >= end and not line), len(lines)
        )
    message = " ".join(lines[:end])
    return message if " " in message else f"{type(error).__name__}: {message}".rstrip(": ")


def not_finite(what: str, wrong: int, heads: int, first: tuple[int, ...]) -> str:
    """Build the error message for a value that is NaN for ``wrong`` of ``heads`` KV heads, one of them ``first``."""
    where = f"{wrong} of {heads} KV heads, the first in layer {first[0]}, head {first[1]}"
    return f"{what} is not a number for {where}\n{OVERFLOW}"
