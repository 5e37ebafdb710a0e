"""Keep an earlier proposal in ``layouts/<name>/`` when the budget changes, or list the layouts a new one replaces."""

import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors, locks, names, progress, replace, tables


def keep_other_budget(folder: Path, files: Collection[str], budget: int, reporter: progress.Reporter) -> bool:
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
    with replace.replacing(kept_folder, stale=[file.name for file in kept_folder.glob("*") if file.is_file()]) as new:
        for name in files:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, new / name)
    reporter.announce(f"kept the earlier layouts for {earlier_budget} global heads in {kept_folder}")
    return True


def replaced_layouts(folder: Path, layouts: Mapping[str, Layout], files: Collection[str]) -> list[str]:
    """List the layouts in ``folder`` that the new ones change or remove, of ``files`` written or removed."""
    earlier = {Path(name).stem: _read(folder / name) for name in sorted(files) if name.endswith(".yaml")}
    return [
        name
        for name, layout in earlier.items()
        if layout is not None and (name not in layouts or layouts[name].content_hash != layout.content_hash)
    ]


def write_layouts(
    folder: Path, kind: str, layouts: Mapping[str, Layout], rows: pd.DataFrame, reporter: progress.Reporter
) -> None:
    """Write ``<kind>.csv`` and ``<kind>/<name>.yaml`` per layout over all of that folder, locked, with a warning.

    ``kind`` is ``workspace.BUDGETS`` or ``workspace.SOLUTIONS``.
    """
    target = folder / kind
    with locks.locked(folder, "writes layouts", reporter.announce):
        stale = [file.name for file in target.glob("*.yaml")]
        if replaced := replaced_layouts(target, layouts, stale):
            reporter.caution(f"replaced earlier layouts in {target}: {', '.join(replaced)}")
        with replace.replacing(target, stale=stale) as new:
            for name, layout in layouts.items():
                layout.write(new / f"{names.check_name(name, 'the layout')}.yaml")
        tables.write_csv(folder / f"{kind}.csv", rows, digits=10)


def _read(file: Path) -> Layout | None:
    """Read a layout; return None if the file is missing or unreadable."""
    if not file.is_file():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # edited by hand: irrelevant, it is about to be replaced
        try:
            return Layout.read(file)
        except errors.UserError:
            return None
