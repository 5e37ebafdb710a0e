"""Find the documents that layouts were selected on, which a verdict on these layouts must not use.

They are found by content: the provenance of a layout, and of equal layouts of the workspace, names the file with the
documents of its probe, and the tables of scores and searches list the layouts that they compared.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import SelectionDocuments
from spkv_nas.artifacts.selection import PATTERN, SELECTION, Selection, read_selection
from spkv_nas.base import errors, names, records, schema
from spkv_nas.base.tables import Column, read_table
from spkv_nas.base.workspace import Workspace
from spkv_nas.data.blocks import TokenBlocks

# Tables of layouts, and the commands that write them
_TABLES = {
    "search": "search",
    "zero-shot": "score",
}


class _Record(schema.Recorded):
    """Keys of the records of scores and searches that say what they were measured on."""

    selection: str | None = None
    num_documents: int | None = None
    documents: SelectionDocuments | None = None


@dataclass(frozen=True)
class Selected:
    """Documents (``DocumentInfo.text_id``) that layouts were selected on, by what selected them.

    That is such as "probe mine" or "search mine among 248 layouts scored on 9 documents". ``unknown`` names layouts of
    which no record, or not every record, has its documents.
    """

    by_record: Mapping[str, Selection] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @property
    def documents(self) -> Selection:
        """Return all documents that any layout was selected on."""
        return frozenset[str]().union(*self.by_record.values())

    def with_contest(self, documents: Selection) -> "Selected":
        """Return these documents and those that layouts of each budget are compared on."""
        return replace(
            self,
            by_record={**self.by_record, "the comparison of layouts of each budget": documents},
        )

    @property
    def by(self) -> tuple[str, ...]:
        """Return what selected the layouts."""
        return tuple(self.by_record)

    def count(self, blocks: TokenBlocks) -> int:
        """Return how many of the documents that blocks have tokens of are these, or pieces of the same texts."""
        documents = self.documents
        return sum(info.text_id in documents for info in blocks.present)

    def among(self, blocks: TokenBlocks) -> tuple[str, ...]:
        """Return what selected a layout on documents that blocks have tokens of."""
        return tuple(
            record for record, documents in self.by_record.items() if documents & blocks.text_ids
        )


def find_selected(
    workspace: Workspace,
    layouts: Mapping[str, Layout],
    *,
    near: Iterable[Path] = (),
    with_scores: bool = True,
    with_equal: bool = True,
) -> Selected:
    """Find the documents that ``layouts``, by name, were selected on.

    There may be files of documents near the layout files ``near``, too; a file in a checkpoint's own folder lists those
    that it was trained on. ``with_equal`` counts what selected equal layouts of the workspace, too; layouts that are
    about to be chosen by rule do not depend on it. ``with_scores`` counts the documents of ``score``, whose table shows
    which layout is best.
    """
    near = list(near)
    folders = _folders(workspace, near)
    equal = _provenances(workspace) if with_equal else {}
    by_record: dict[str, Selection] = {}
    # Add what checkpoints were trained on
    for folder in near:
        for file in folder.glob(PATTERN):
            trained_on = read_selection(file.stem.removeprefix(f"{SELECTION}-"), [folder])
            _merge(by_record, "training", trained_on or frozenset())
    # Merge what selected each layout, and remember layouts whose documents are not fully known
    unknown = []
    for name, layout in layouts.items():
        evidence = _probes([layout.provenance, *equal.get(layout.content, ())])
        evidence += _comparisons(workspace, layout, with_scores=with_scores)
        is_known = bool(evidence)
        for record, selection_digest in evidence:
            selection = read_selection(selection_digest, folders)
            if selection is None:
                is_known = False
            else:
                _merge(by_record, record, selection)
        if not is_known:
            unknown.append(name)
    return Selected(by_record, tuple(unknown))


def _merge(by_record: dict[str, Selection], record: str, selection: Selection) -> None:
    """Add documents to those of a record."""
    by_record[record] = by_record.get(record, frozenset()) | selection


def _folders(workspace: Workspace, near: Iterable[Path]) -> list[Path]:
    """Return the folders that may have files of documents: those near layout files, and those of results."""
    in_workspace: dict[Path, None] = {}
    for kind in ("probes/*", "layouts/*", "layouts/*/*", "reports/*"):
        for file in workspace.root.glob(f"{kind}/{PATTERN}"):
            in_workspace[file.parent] = None
    near_files = [folder for file in near for folder in (file.parent, file.parent.parent)]
    return [*near_files, *in_workspace]


def _probes(origins: Iterable[Mapping[str, Any]]) -> list[tuple[str, object]]:
    """Return the probes in provenances, for people, each with the digest of its documents."""
    return [
        (f"probe {origin['probe']}", origin.get(SELECTION))
        for origin in origins
        if "probe" in origin
    ]


def probe_of(workspace: Workspace, layouts: Iterable[Layout]) -> str | None:
    """Return the only probe that layouts, or equal ones of a workspace, are from; None if there is none or several."""
    equal = _provenances(workspace)
    origins = [
        origin
        for layout in layouts
        for origin in (
            [layout.provenance] if "probe" in layout.provenance else equal.get(layout.content, ())
        )
    ]
    probes = {str(origin["probe"]) for origin in origins if "probe" in origin}
    return names.check_name(probes.pop(), "the probe of the layouts") if len(probes) == 1 else None


def recorded_reading(layouts: Iterable[Layout]) -> tuple[str | None, str | None]:
    """Return the separator and the kind of documents of the text that layouts are from; None where not recorded.

    Raises ``UserError`` if they are from texts that differ in these.
    """
    origins = [layout.provenance for layout in layouts if "probe" in layout.provenance]
    recorded = {(origin.get("separator"), origin.get("documents")) for origin in origins} or {
        (None, None)
    }
    if len(recorded) > 1:
        raise errors.UserError(
            "the candidates' scores are from texts with different separators or documents: "
            "judge them one at a time"
        )
    separator, documents = (None if value is None else str(value) for value in recorded.pop())
    return separator, documents


def _provenances(workspace: Workspace) -> dict[str, list[Mapping[str, Any]]]:
    """Return the provenance of all layouts of a workspace, by their content."""
    provenances: dict[str, list[Mapping[str, Any]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files that were edited, and are not candidates
        for file in sorted((workspace.root / "layouts").rglob("*.yaml")):
            with suppress(errors.UserError):
                layout = Layout.read(file)
                provenances.setdefault(layout.content, []).append(layout.provenance)
    return provenances


def _comparisons(
    workspace: Workspace, layout: Layout, *, with_scores: bool
) -> Iterator[tuple[str, object]]:
    """Yield the scores and searches that have a layout, for people, each with the digest of its documents."""
    for table, command in _TABLES.items():
        for file in sorted(workspace.reports.glob(f"*/{table}*.csv")):
            rows = read_table(
                file, "table of layouts", (Column("hash", default=""),), others=True, empty=True
            )
            hashes = set(rows["hash"]) - {""}
            if layout.hash in hashes and (with_scores or command != "score"):
                record = records.read_unchecked(file.with_suffix(".yaml"), table, _Record)
                # Count the layouts that were compared, and the documents if their number is known
                layouts = f"{len(hashes)} layout{'s' if len(hashes) != 1 else ''}"
                number = (record.get("documents") or {}).get("chosen_on") or record.get(
                    "num_documents"
                )
                documents = f" on {number} document{'s' if number != 1 else ''}" if number else ""
                yield (
                    f"{command} {file.parent.name} among {layouts} scored{documents}",
                    record.get(SELECTION),
                )
