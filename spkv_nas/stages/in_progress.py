"""What commands that still work have got so far, for a report that is watched: by the files that they leave meanwhile.

A search has its study in ``runs/NAME/search/``; one in a database of its own (``--storage``) is not seen. A training
has the log of its newest checkpoint, in ``runs/NAME/`` too.
"""

from __future__ import annotations

from pathlib import Path

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.extras import missing_extra
from spkv_nas.base.progress import Reporter
from spkv_nas.base.workspace import Workspace
from spkv_nas.report.in_progress import Part, searching, section, training
from spkv_nas.report.section import Section
from spkv_nas.stages.results import SEARCH
from spkv_nas.training.training_progress import unfinished_trainings


def under_way(place: Workspace, name: str, reporter: Reporter) -> Section | None:
    """What is not finished of a name; None where nothing is."""
    found = unfinished_trainings(place.run_dir(name))
    trainings = [
        training(one.name, one.step, one.num_steps, one.log, is_held=one.is_held, count=count)
        for count, one in enumerate(found)
    ]
    return section([*_search(place, name, reporter), *trainings])


def _search(place: Workspace, name: str, reporter: Reporter) -> list[Part]:
    """A search at which somebody is, or that has not come to its table."""
    folder = place.run_dir(name) / "search"
    try:
        from spkv_nas.search.search_progress import FILE, read_progress
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        if _begun(folder):
            reporter.caution(f"without what the search in {folder} has found: {first_line(missing)}")
        return []
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        found = read_progress(file, name)
    except UserError as error:  # it is being made, or damaged, which the search itself says
        reporter.detail(first_line(error))
        return []
    if found is None or (not found.num_workers and (place.report_dir(name) / SEARCH).is_file()):
        return []
    return [searching(found.scored, found.retrained, found.num_workers)]


def _begun(folder: Path) -> bool:
    return any(folder.glob("*.db"))
