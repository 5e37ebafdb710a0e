"""Keep what an earlier proposal left in ``layouts/<name>/``, or say which of its layouts a new one replaces."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Reporter
from spkv_nas.base.replace import replacing, settle


def keep_other_budget(folder: Path, files: Collection[str], budget: int, reporter: Reporter) -> bool:
    """Copy an earlier proposal to ``<folder>/<its budget>-heads/`` if it is for another number of global heads.

    Args:
        folder: of the layouts; locked, so that no other process proposes meanwhile.
        files: names of the files that the new proposal writes or removes.
        budget: global heads of the new proposal.
        reporter: told where the earlier layouts are kept.

    Returns:
        Whether there was such a proposal.
    """
    settle(folder)
    earlier = _read(folder / "densest.yaml")
    if earlier is None or (before := _budget(earlier)) == budget:
        return False
    kept = folder / f"{before}-heads"
    with replacing(kept, stale=[file.name for file in kept.glob("*") if file.is_file()]) as new:
        for name in files:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, new / name)
    reporter.announce(f"the layouts for {before} global heads are kept in {kept}")
    return True


def replaced_layouts(folder: Path, layouts: Mapping[str, Layout], files: Collection[str]) -> list[str]:
    """List the layouts in ``folder`` that new ones of the same name change, or that go.

    Args:
        layouts: the new ones by name.
        files: names of the files that are written or removed.
    """
    found = {Path(name).stem: _read(folder / name) for name in sorted(files) if name.endswith(".yaml")}
    return [
        name
        for name, layout in found.items()
        if layout is not None and (name not in layouts or layouts[name].content_hash != layout.content_hash)
    ]


def _budget(layout: Layout) -> int:
    """Global heads that a layout was proposed for; those that it has where its file does not say it."""
    budget = layout.provenance.get("budget")
    return budget if isinstance(budget, int) and budget > 0 else layout.num_global


def _read(file: Path) -> Layout | None:
    """A layout; None where there is none, or none that can be read."""
    if not file.is_file():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of edits: it is about to be replaced
        try:
            return Layout.read(file)
        except UserError:
            return None
