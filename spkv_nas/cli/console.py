"""How results reach standard output, and all else standard error; lines are not wrapped where they are piped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as ProgressBar

from spkv_nas.base.distributed import process_index
from spkv_nas.base.progress import Progress
from spkv_nas.stages.reporter import Reporter

PACKAGE = Path(__file__).parent.parent
out = Console(highlight=False, quiet=process_index() > 0)
err = Console(stderr=True, highlight=False, quiet=process_index() > 0)


def say(text: str) -> None:
    """A result, as it is."""
    out.print(escape(text), soft_wrap=not out.is_terminal)


def caution(text: str) -> None:
    """What the reader should know before trusting a result."""
    err.print(f"[yellow]{escape(text)}[/yellow]", soft_wrap=not err.is_terminal)


def announce(line: str) -> None:
    """What is being done."""
    err.print(f"[dim]{escape(line)}[/dim]", soft_wrap=not err.is_terminal)


def say_where(what: str, path: Path) -> None:
    """Where a result is; never wrapped, so that it can be copied."""
    out.print(f"{what}: [bold]{escape(str(path))}[/bold]", soft_wrap=True)


def fail(text: str) -> None:
    """A user's mistake."""
    err.print(f"[bold red]error:[/bold red] {escape(text)}", soft_wrap=not err.is_terminal)


def warn(text: str) -> None:
    """A warning of the package's own."""
    err.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=not err.is_terminal)


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """A progress bar while the block runs; yields what tells it (done, total)."""
    with ProgressBar(transient=True, console=err, disable=not err.is_terminal) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


reporter = Reporter(announce=announce, caution=caution, bar=bar)
