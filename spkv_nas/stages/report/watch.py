"""Watch: rewrite the report whenever its files change, while other commands work on the workspace.

Results are compared by size and modification time, every few seconds; unfinished or missing results are waited for.
Scanning takes at most a tenth of a core, to leave the rest to the commands at work.
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
from spkv_nas.stages.checks import check
from spkv_nas.stages.report.options import ReportOptions
from spkv_nas.stages.report.results import SEARCH
from spkv_nas.stages.report.stage import page_names, report

EVERY, SELDOM = 3.0, 60.0  # minimum and maximum seconds between two scans
_SHARE = 9  # waiting time, in multiples of a scan's CPU time
_OWN = ("layouts", "reports")  # folders of which a page reads its own name's; it reads all probes
_READ = (".csv", ".tsv", ".yaml", ".npz")  # suffixes of files that a report reads, none of which it writes
Seen = dict[Path, tuple[int, int]]  # (modification time in ns, bytes) of files


def watch(options: ReportOptions, reporter: Reporter = SILENT, wait: Callable[[float], None] = time.sleep) -> NoReturn:
    """Write the report, and write it again whenever its files change, until a signal or ``wait`` raises.

    Args:
        options: options of ``report``.
        reporter: receives messages and progress.
        wait: called between two scans, with the seconds to wait.

    Raises:
        UserError: unknown figures, or a workspace that cannot be written, before anything is read.
    """
    check(options)
    options.folders.check_writable()
    last_state: Seen | None = None
    names: list[str] = []
    last_message = ""
    while True:
        # Scan the files
        began = time.process_time()
        scanned = _scan(options)
        changed = _select(scanned, names, options) != last_state
        # Rewrite what changed
        try:
            if changed:
                page = report(options, reporter, written=datetime.now(timezone.utc))
                names, last_message = page_names(options), ""
                reporter.announce(f"written: {page}")
        except (UserError, OSError) as error:
            if last_message != (last_message := f"waiting: {first_line(error)}"):
                reporter.announce(last_message)
        # Wait
        if changed:
            last_state = _select(scanned, names, options)
        wait(EVERY if changed else min(SELDOM, max(EVERY, _SHARE * (time.process_time() - began))))


def _scan(options: ReportOptions) -> Seen:
    """Return the state of every file of results that a report can read."""
    root, seen = options.folders.root, {}
    probe_files = [Path(options.probe)] if options.probe is not None else []
    for path in chain(*((root / kind).glob("*/*") for kind in ("probes", *_OWN)), probe_files):
        with suppress(OSError):  # just replaced, or the name of a probe
            status = path.stat()
            if path.suffix in _READ:
                seen[path] = status.st_mtime_ns, status.st_size
    return seen


def _select(seen: Seen, names: list[str], options: ReportOptions) -> Seen:
    """Select the files of the pages: their layouts and results, and all probes.

    While no page has been written, that is every file. Unless a probe was named, layouts and searches that would add a
    page count too.
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
