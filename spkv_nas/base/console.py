"""Print results to standard output, all else to standard error; only a terminal gets wrapped lines."""

import io
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, ConsoleDimensions, ConsoleOptions
from rich.markup import escape as escape
from rich.segment import Segment
from rich.table import Column as Column
from rich.table import Table as Table
from rich.text import Text

from spkv_nas.base.distributed import process_index
from spkv_nas.base.errors import printable

PACKAGE = Path(__file__).parent.parent
_UNLIMITED = 1 << 16  # columns, where output is not a terminal
# Exit code, as shells report of programs that SIGPIPE ends; 1 would be an answer of some commands
_NO_READER = 141


class NoReader(SystemExit):
    """Exit because the program that read the output, such as ``head``, has ended."""

    def __init__(self) -> None:
        """Set the exit code."""
        super().__init__(_NO_READER)


class Stream(Console):
    """A rich console that wraps lines and cuts table cells only in a terminal; ``before`` runs before it prints."""

    def __init__(self, **options: Any) -> None:
        """Create a console that prints on rank 0 only; ``options`` are those of ``rich.console.Console``."""
        super().__init__(highlight=False, quiet=process_index() > 0, **options)
        self.before: Callable[[], None] = lambda: None

    @property
    def is_seen(self) -> bool:
        """Return True if the output is a terminal that can redraw lines."""
        return bool(self.file.isatty()) and not self.is_dumb_terminal

    @property  # type: ignore[misc]
    def size(self) -> ConsoleDimensions:
        """Return the terminal's size; elsewhere a width that wraps nothing."""
        return super().size if self.file.isatty() else ConsoleDimensions(_UNLIMITED, 25)

    def print(self, *objects: Any, **options: Any) -> None:
        """Call ``before``, then print as rich does."""
        self.before()
        super().print(*objects, **options)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render anything that is printed, with unprintable characters, as file names may have them, as escapes."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def tell(self, text: str, style: str = "", *, head: str = "", head_style: str = "") -> None:
        """Print text, without markup, after ``head``; wrap only between words, so that a long path can be copied."""
        lines = [
            textwrap.fill(line, self.width, break_long_words=False, break_on_hyphens=False)
            for line in f"{head}{text}".splitlines()
        ]
        styled = Text("\n".join(lines), style)
        styled.stylize(head_style, 0, len(head))
        self.print(styled, soft_wrap=True)

    def write(self, text: str) -> None:
        """Write text unchanged and flush it; no line break is added."""
        if self.quiet:
            return
        self.before()
        try:
            self.file.write(text)
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> NoReturn:
        """Discard further output, which Python writes when it exits, and raise ``NoReader``."""
        self.quiet = True
        with suppress(OSError):  # a stream without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)
        raise NoReader


out = Stream()
err = Stream(stderr=True)


def escape_unencodable() -> None:
    """Print what the encoding of a stream lacks, such as ± in ASCII or a file name's invalid bytes, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def say(text: str | None) -> None:
    """Print one line of a result to standard output; nothing for None."""
    if text is not None:
        out.tell(text)


def print_path(label: str, path: Path) -> None:
    """Print the path of a result after its label, on one line."""
    name = str(path).replace("\n", "\\n")
    out.print(Text.assemble(f"{label}: ", (name, "bold")), soft_wrap=True)


def caution(text: str | None) -> None:
    """Print, in yellow on standard error, a caveat about a result; nothing for None."""
    if text is not None:
        err.tell(text, "yellow")


def announce(line: str) -> None:
    """Print, dimmed on standard error, what the command is doing."""
    err.tell(line, "dim")


def fail(text: str) -> None:
    """Print an error message to standard error."""
    err.tell(text, head="error: ", head_style="bold red")


def warn(text: str) -> None:
    """Print a warning of this package to standard error."""
    err.tell(text, head="warning: ", head_style="yellow")


def show_warnings() -> None:
    """Print this package's warnings as their text only, and others in Python's format, until filters are restored."""
    warnings.showwarning = partial(_show_warning, warnings.showwarning)


def _show_warning(
    python_showwarning: Callable[..., None],
    message: Warning | str,
    kind: type[Warning],
    file: str,
    *details: Any,
) -> None:
    """Print a warning, by ``python_showwarning`` unless it is this package's."""
    if kind is UserWarning and Path(file).is_relative_to(PACKAGE):
        warn(str(message))
    else:
        python_showwarning(message, kind, file, *details)
