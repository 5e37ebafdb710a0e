"""Watch: the report written again whenever what it reads has changed, while other commands work on the workspace.

Files are looked at by their sizes and times alone, every few seconds. What another command has not finished writing, or
has not begun, is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import NoReturn

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.stages.options import ReportOptions
from spkv_nas.stages.report import check_figures, report

EVERY = 3.0  # seconds between two looks
_OWN = ("layouts", "reports")  # kinds of folders of which a report reads that of its name; of probes it reads all
_READ = (".csv", ".tsv", ".yaml", ".npz")  # endings of what a report reads; it writes none of them
Seen = dict[Path, tuple[int, int]]  # (nanoseconds of the last change, bytes) of files


def watch(options: ReportOptions, reporter: Reporter = SILENT, wait: Callable[[float], None] = time.sleep) -> NoReturn:
    """Write the report, and again whenever a file that it is of has changed, until a signal or ``wait`` raises.

    ``wait`` is called between two looks, with ``EVERY``.

    Raises:
        UserError: figures that are not known, or a workspace that cannot be written, before anything is read.
    """
    check_figures(options)
    options.place.check_writable()
    before: Seen | None = None
    name = said = ""
    while True:
        seen = _look(options)
        if _of(seen, name) != before:
            try:
                page = report(options, reporter, written=datetime.now(timezone.utc))
                name, said = page.parent.name, ""
                reporter.announce(f"written: {page}")
            except (UserError, OSError) as error:
                if said != (said := f"waiting: {first_line(error)}"):
                    reporter.announce(said)
            before = _of(seen, name)
        wait(EVERY)


def _look(options: ReportOptions) -> Seen:
    """Every file that a report of the workspace can read."""
    root, seen = options.place.root, {}
    named = [Path(options.probe)] if options.probe is not None else []
    for path in chain(*((root / kind).glob("*/*") for kind in ("probes", *_OWN)), named):
        with suppress(OSError):  # just replaced, or no file but the name of a probe
            told = path.stat()
            if path.suffix in _READ:
                seen[path] = told.st_mtime_ns, told.st_size
    return seen


def _of(seen: Seen, name: str) -> Seen:
    """Those of one report: its layouts and results, and all probes; every file while its name is not known, ""."""
    if not name:
        return seen
    return {
        path: state for path, state in seen.items() if path.parent.parent.name not in _OWN or path.parent.name == name
    }
