"""Keep layouts of other inputs, which new ones of their names replace in ``layouts/<name>/``.

An earlier proposal of another budget has a folder of its own, ``<budget>-heads/``; single layouts are copied to
``earlier/`` under names with a hash, as results are (``result_tables.kept_name``).
"""

import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import kept_name
from spkv_nas.base import errors, locks, names, progress, replace, tables

KEPT = "earlier"  # folder of kept layouts, in the folder of those that replaced them
# Key of a layout's provenance: ``inputs`` of the result that chose it among budgets
DECIDED_BY = "critical_budget"


def keep_other_budget(
    folder: Path, files: Collection[str], budget: int, reporter: progress.Reporter
) -> bool:
    """Copy an earlier proposal of another budget to ``<folder>/<its budget>-heads/``; return whether there was one.

    The caller holds the folder's lock. ``files`` are those that the new proposal writes or removes.
    """
    replace.settle(folder)
    earlier = _read(folder / "densest.yaml")
    if earlier is None:
        return False
    # The budget that the file records, or its number of global heads
    recorded = earlier.provenance.get("budget")
    earlier_budget = recorded if isinstance(recorded, int) and recorded > 0 else earlier.num_global
    if earlier_budget == budget:
        return False
    # Copy its files to a folder of their own
    kept_folder = folder / f"{earlier_budget}-heads"
    stale = [file.name for file in kept_folder.glob("*") if file.is_file()]
    with replace.replacing(kept_folder, stale=stale) as new:
        for name in files:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, new / name)
    reporter.announce(
        f"kept the earlier layouts for {earlier_budget} global heads in {kept_folder}"
    )
    return True


def keep_layouts(
    folder: Path, layouts: Mapping[str, Layout], files: Collection[str], reporter: progress.Reporter
) -> list[Path]:
    """Copy the layouts in ``folder`` that the new ones change or remove to ``<folder>/earlier/``; return the copies.

    ``files`` are those that are written or removed, ``layouts`` the new ones by the name of their file. A layout is the
    same if its heads and windows are, and if one result decided on both (``DECIDED_BY``). Copies are named by that
    result, or by the layout's content.
    """
    copies = []
    for name in sorted(files):
        layout = _read(folder / name) if name.endswith(".yaml") else None
        if layout is None or _identity(layout) == _identity(layouts.get(Path(name).stem)):
            continue
        decided_by = str(layout.provenance.get(DECIDED_BY, layout.hash))
        copy = folder / KEPT / kept_name(name, decided_by)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, copy)
        copies.append(copy)
    if copies:
        kept = ", ".join(copy.stem for copy in copies)
        reporter.announce(f"kept earlier layouts of other inputs in {folder / KEPT}: {kept}")
    return copies


def _identity(layout: Layout | None) -> tuple[str, object] | None:
    """Return what tells layouts of other inputs apart; None for none."""
    return None if layout is None else (layout.content_hash, layout.provenance.get(DECIDED_BY))


def write_layout(file: Path, layout: Layout, reporter: progress.Reporter) -> None:
    """Write one layout, and keep an earlier one of other inputs under its name (``keep_layouts``)."""
    with locks.locked(file.parent, "writes layouts", reporter.announce):
        keep_layouts(file.parent, {file.stem: layout}, [file.name], reporter)
        layout.write(file)


def write_layouts(
    folder: Path,
    kind: str,
    layouts: Mapping[str, Layout],
    rows: pd.DataFrame,
    reporter: progress.Reporter,
) -> None:
    """Write ``<kind>.csv`` and ``<kind>/<name>.yaml`` per layout over all of that folder, locked, with a warning.

    ``kind`` is ``workspace.BUDGETS`` or ``workspace.SOLUTIONS``.
    """
    target = folder / kind
    with locks.locked(folder, "writes layouts", reporter.announce):
        stale = [file.name for file in target.glob("*.yaml")]
        keep_layouts(target, layouts, stale, reporter)
        with replace.replacing(target, stale=stale) as new:
            for name, layout in layouts.items():
                layout.write(new / f"{names.check_name(name, 'the layout')}.yaml")
        tables.write_csv(folder / f"{kind}.csv", rows, digits=10)


def _read(file: Path) -> Layout | None:
    """Read a layout; return None if the file is missing or unreadable."""
    if not file.is_file():
        return None
    with warnings.catch_warnings():
        # A layout that was edited by hand is about to be replaced
        warnings.simplefilter("ignore", UserWarning)
        try:
            return Layout.read(file)
        except errors.UserError:
            return None
