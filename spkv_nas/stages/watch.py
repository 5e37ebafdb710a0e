"""Watch: the report written again whenever what it reads has changed, while other commands work on the workspace.

Results are looked at by the sizes and times of their files alone, every few seconds. What another command has not
finished writing, or has not begun, is waited for. What a search or a training leaves while it still works
(``stages.in_progress``) is read at every look; where that alone has changed, no picture is drawn again. Looking takes a
tenth of a core at most, of which those who work have more need.
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
from spkv_nas.report.section import Section
from spkv_nas.stages.checks import check
from spkv_nas.stages.in_progress import under_way
from spkv_nas.stages.options import ReportOptions
from spkv_nas.stages.report import page_names, report
from spkv_nas.stages.results import SEARCH

EVERY, SELDOM = 3.0, 60.0  # seconds between two looks, at least and at most
_SHARE = 9  # times as long as a look takes of a core is waited for the next
_OWN = ("layouts", "reports")  # kinds of folders of which a page reads that of its name; of probes it reads all
_READ = (".csv", ".tsv", ".yaml", ".npz")  # endings of what a report reads; it writes none of them
Seen = dict[Path, tuple[int, int]]  # (nanoseconds of the last change, bytes) of files


def watch(options: ReportOptions, reporter: Reporter = SILENT, wait: Callable[[float], None] = time.sleep) -> NoReturn:
    """Write the report, and again whenever a file that it is of has changed, until a signal or ``wait`` raises.

    ``wait`` is called between two looks, with seconds.

    Raises:
        UserError: figures that are not known, or a workspace that cannot be written, before anything is read.
    """
    check(options)
    options.place.check_writable()
    before: Seen | None = None
    names: list[str] = []
    shown: dict[str, Section | None] = {}
    said = ""
    while True:
        began = time.process_time()
        seen = _look(options)
        changed = _of(seen, names, options) != before
        try:
            now = _under_way(options, names, reporter)
            if changed or now != shown:
                page = report(options, reporter, written=datetime.now(timezone.utc), pictures=changed)
                names, said = page_names(options), ""
                shown = _under_way(options, names, reporter) if changed else now
                reporter.announce(f"written: {page}")
        except (UserError, OSError) as error:
            if said != (said := f"waiting: {first_line(error)}"):
                reporter.announce(said)
        if changed:
            before = _of(seen, names, options)
        wait(EVERY if changed else min(SELDOM, max(EVERY, _SHARE * (time.process_time() - began))))


def _under_way(options: ReportOptions, names: list[str], reporter: Reporter) -> dict[str, Section | None]:
    return {name: under_way(options.place, name, reporter) for name in names}


def _look(options: ReportOptions) -> Seen:
    """Every file of results that a report of the workspace can read."""
    root, seen = options.place.root, {}
    named = [Path(options.probe)] if options.probe is not None else []
    for path in chain(*((root / kind).glob("*/*") for kind in ("probes", *_OWN)), named):
        with suppress(OSError):  # just replaced, or no file but the name of a probe
            told = path.stat()
            if path.suffix in _READ:
                seen[path] = told.st_mtime_ns, told.st_size
    return seen


def _of(seen: Seen, names: list[str], options: ReportOptions) -> Seen:
    """Those of the pages: their layouts and results, and all probes; every file while no page has been written.

    Where the pages are all that there are, also layouts and searches that would make one more.
    """
    if not names:
        return seen
    return {
        path: state
        for path, state in seen.items()
        if path.parent.parent.name not in _OWN
        or path.parent.name in names
        or (options.probe is None and (path.name == SEARCH or path.parent.parent.name == "layouts"))
    }
