"""How results reach standard output, and all else standard error; lines are not wrapped where they are piped."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from spkv_nas.base.distributed import process_index

PACKAGE = Path(__file__).parent.parent
_ENDLESS = 1 << 16  # columns, of what no terminal shows


class Stream(Console):
    """A console that knows whether a terminal shows it: elsewhere no line is wrapped, and no cell of a table cut.

    Attributes:
        before: called before anything is printed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, quiet=process_index() > 0, **options)
        self.before: Callable[[], None] = lambda: None

    @property
    def is_seen(self) -> bool:
        """Whether a terminal shows it."""
        return bool(self.file.isatty()) and not self.is_dumb_terminal

    @property  # type: ignore[misc]
    def size(self) -> ConsoleDimensions:
        """Of the terminal."""
        return super().size if self.file.isatty() else ConsoleDimensions(_ENDLESS, 25)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does."""
        self.before()
        super().print(*objects, **options)

    def tell(self, text: str, style: str = "", *, head: str = "", head_style: str = "") -> None:
        """Print text, after its head, broken between words alone: a path that does not fit can still be copied."""
        lines = [
            textwrap.fill(line, self.width, break_long_words=False, break_on_hyphens=False)
            for line in f"{head}{text}".splitlines()
        ]
        shown = Text("\n".join(lines), style)
        shown.stylize(head_style, 0, len(head))
        self.print(shown, soft_wrap=True)

    def write(self, text: str) -> None:
        """Print text as it is, at once and without a line break at its end."""
        if self.quiet:
            return
        self.before()
        self.file.write(text)
        self.file.flush()


out = Stream()
err = Stream(stderr=True)


def say(text: str) -> None:
    """A result, as it is."""
    out.tell(text)


def say_where(what: str, path: Path) -> None:
    """Where a result is; never wrapped."""
    out.print(Text.assemble(f"{what}: ", (str(path), "bold")), soft_wrap=True)


def caution(text: str) -> None:
    """What the reader should know before trusting a result."""
    err.tell(text, "yellow")


def announce(line: str) -> None:
    """What is being done."""
    err.tell(line, "dim")


def fail(text: str) -> None:
    """A user's mistake."""
    err.tell(text, head="error: ", head_style="bold red")


def warn(text: str) -> None:
    """A warning of the package's own."""
    err.tell(text, head="warning: ", head_style="yellow")
