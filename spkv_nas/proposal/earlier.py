"""Keep an earlier proposal in ``layouts/<name>/`` when the budget changes, or list the layouts a new one replaces."""

import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors, names, progress, replace


def keep_other_budget(folder: Path, files: Collection[str], budget: int, reporter: progress.Reporter) -> bool:
    """Copy an earlier proposal to ``<folder>/<its budget>-heads/`` if its number of global heads differs.

    Args:
        folder: folder of the layouts; the caller holds its lock.
        files: names of the files that the new proposal writes or removes.
        budget: global heads of the new proposal.
        reporter: receives a message that names the folder of the earlier layouts.

    Returns:
        True if there was such a proposal.
    """
    replace.settle(folder)
    earlier = _read(folder / "densest.yaml")
    if earlier is None or (earlier_budget := _budget(earlier)) == budget:
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
    """List the layouts in ``folder`` that the new ones change or remove.

    Args:
        folder: folder of the layouts.
        layouts: new layouts by name.
        files: names of the files that are written or removed.
    """
    earlier = {Path(name).stem: _read(folder / name) for name in sorted(files) if name.endswith(".yaml")}
    return [
        name
        for name, layout in earlier.items()
        if layout is not None and (name not in layouts or layouts[name].content_hash != layout.content_hash)
    ]


def replace_layouts(folder: Path, layouts: Mapping[str, Layout], reporter: progress.Reporter) -> None:
    """Write ``<name>.yaml`` per layout in place of all layouts of a folder; the caller holds the lock above it.

    Args:
        folder: folder that holds nothing but these layouts.
        layouts: new layouts by name.
        reporter: warned of the layouts that are replaced.
    """
    stale = [file.name for file in folder.glob("*.yaml")]
    if replaced := replaced_layouts(folder, layouts, stale):
        reporter.caution(f"replaced earlier layouts in {folder}: {', '.join(replaced)}")
    with replace.replacing(folder, stale=stale) as new:
        for name, layout in layouts.items():
            layout.write(new / f"{names.check_name(name, 'the layout')}.yaml")


def _budget(layout: Layout) -> int:
    """Return the budget a layout was proposed for, or its number of global heads if the file does not record it."""
    budget = layout.provenance.get("budget")
    return budget if isinstance(budget, int) and budget > 0 else layout.num_global


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
