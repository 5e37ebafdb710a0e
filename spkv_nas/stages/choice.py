"""Find the documents that chose a layout, which must not judge it.

A layout was chosen on the text that its probe, a search, or ``score`` measured, if the workspace has a record of it.
All documents of that text count, also where only a part of their tokens was measured. Documents are compared by the
text that they are pieces of, because how long texts are cut depends on the block size and on the number of documents.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spkv_nas.artifacts.defaults import SCORING_TOKENS
from spkv_nas.artifacts.head_scores import RECORD
from spkv_nas.artifacts.kinds import DENSITY
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_file import ProbeFile
from spkv_nas.artifacts.search_table import SearchRecord
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import Reporter
from spkv_nas.base.records import read_unchecked
from spkv_nas.base.schema import validate
from spkv_nas.base.tables import Column, read_table
from spkv_nas.base.workspace import Workspace
from spkv_nas.data.config import AUTO, DataConfig
from spkv_nas.data.splits import load_heldout, load_text
from spkv_nas.evaluation.separators import SeparatorReport
from spkv_nas.model.checkpoint import read_gates
from spkv_nas.probing.registry import SIGNALS
from spkv_nas.stages.options import REFERENCE
from spkv_nas.stages.record import read_options
from spkv_nas.stages.subject import Subject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spkv_nas.data.blocks import DocumentInfo, TokenBlocks

_SCORE = "score"


@dataclass(frozen=True)
class Choice:
    """Documents that chose layouts.

    Attributes:
        texts: identities of the texts that they are, or are pieces of (``DocumentInfo.text_id``).
        records: what chose the layouts, such as "probe mine" or "search mine among 248 layouts scored on 9 documents".
        unrecorded: names of layouts of which no record says what chose them.
    """

    texts: frozenset[str]
    records: tuple[str, ...]
    unrecorded: tuple[str, ...]

    def count(self, blocks: TokenBlocks) -> int:
        """Return how many of the documents that blocks have tokens of are these, or pieces of the same texts."""
        return sum(info.text_id in self.texts for info in documents_of(blocks))


def find_choice(
    workspace: Workspace,
    layouts: Mapping[str, Layout],
    tokenizer: PreTrainedTokenizerBase,
    reporter: Reporter,
    *,
    with_scores: bool = True,
) -> Choice:
    """Read the text of every record that chose one of ``layouts``, by name, to find its documents.

    Must be called on all ranks.

    Args:
        workspace: workspace with the records.
        layouts: layouts by name.
        tokenizer: tokenizer of the model.
        reporter: receives messages and progress.
        with_scores: whether the text of ``score`` counts, whose table shows which layout is best.

    Raises:
        UserError: a recorded text cannot be read any more, so that its documents are unknown.
    """
    chosen: set[str] = set()
    records: dict[str, None] = {}
    unrecorded = []
    for name, layout in layouts.items():
        texts = [text for text in _texts(workspace, layout, tokenizer, reporter) if with_scores or text.kind != _SCORE]
        for text in texts:
            if text.selection in records:
                continue
            try:
                chosen.update(info.text_id for blocks in text.read() for info in documents_of(blocks))
            except UserError as error:
                raise UserError(
                    f"the text of {text.record}, which chose {name}, cannot be read: {first_line(error)}\n"
                    "so its documents cannot be left out; restore the text, or judge in another workspace"
                ) from error
            records[text.selection] = None
        if not texts:
            unrecorded.append(name)
    return Choice(frozenset(chosen), tuple(records), tuple(unrecorded))


def documents_of(blocks: TokenBlocks) -> list[DocumentInfo]:
    """Return the documents that blocks have tokens of."""
    infos = tuple(blocks.documents)
    return [infos[index] for index in np.unique(blocks.document)]


@dataclass(frozen=True)
class _Text:
    """Text that chose a layout.

    Attributes:
        kind: what chose it: a probe, a search, or ``score``.
        name: name of the record.
        read: returns its blocks.
        among: how many layouts were looked at on how many documents; empty if no layout was.
    """

    kind: str
    name: str
    read: Callable[[], Iterable[TokenBlocks]]
    among: str = ""

    @property
    def record(self) -> str:
        """Return the record for people, such as "search mine"."""
        return f"{self.kind} {self.name}"

    @property
    def selection(self) -> str:
        """Return what chose the layout, for people."""
        return f"{self.record}{self.among}"


def _texts(
    workspace: Workspace, layout: Layout, tokenizer: PreTrainedTokenizerBase, reporter: Reporter
) -> Iterator[_Text]:
    """Yield the records that chose a layout, each with a function that reads its text."""
    yield from _probe_text(workspace, layout, tokenizer, reporter)
    # Searches and scores of the workspace that have the layout
    for folder in sorted((workspace.root / "reports").glob("*")):
        for name, kind in (("search", "search"), ("zero-shot", _SCORE)):
            hashes = _hashes(folder / f"{name}.csv")
            if layout.hash not in hashes:
                continue
            record = read_unchecked(folder / f"{name}.yaml", name, SearchRecord)
            data = (record.get("recipe") or record).get("data")
            cache = workspace.run_dir(folder.name) / "blocks"
            yield _Text(
                kind,
                folder.name,
                partial(_blocks, data, record, tokenizer, cache, reporter),
                _among(len(hashes), record.get("num_documents") if kind == _SCORE else _chosen_on(record)),
            )


def _probe_text(
    workspace: Workspace, layout: Layout, tokenizer: PreTrainedTokenizerBase, reporter: Reporter
) -> Iterator[_Text]:
    """Yield the text of the probe that a layout's provenance names, if the workspace has its record."""
    name = _probe_of(workspace, layout)
    if name not in workspace.probes():
        return
    record = read_unchecked(workspace.probe_dir(name) / RECORD, "probe", ProbeFile)
    probe = read_options(record, workspace.root)
    if probe is None:
        return
    signal = SIGNALS[str(record.get("signal", DENSITY))]

    def read() -> Iterable[TokenBlocks]:
        if probe.recipe is None:
            subject = Subject.of(probe, REFERENCE, "probe on")
            learns = signal.needs_gates and read_gates(subject.source) is None
        else:
            subject, learns = Subject.of_recipe(probe, probe.recipe, Path()), False
        train, whole = subject.read(tokenizer, _separator(record), reporter, learns=learns)
        if signal.computes_logits and probe.max_tokens is None:
            whole = whole.spread(max(1, SCORING_TOKENS // whole.block_size))
        return [whole] if train is None else [train, whole]

    yield _Text("probe", name, read)


def _probe_of(workspace: Workspace, layout: Layout) -> str:
    """Return the probe that a layout's provenance names, or for a checkpoint's that of the workspace's equal layout."""
    if "probe" in layout.provenance:
        return str(layout.provenance["probe"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files that were edited, and are not candidates
        for file in sorted((workspace.root / "layouts").rglob("*.yaml")):
            with suppress(UserError):
                other = Layout.read(file)
                if other.content == layout.content and "probe" in other.provenance:
                    return str(other.provenance["probe"])
    return ""


def _hashes(table: Path) -> set[str]:
    """Return the hashes of the layouts in a table of a search or of scores; empty without a table."""
    if not table.is_file():
        return set()
    rows = read_table(table, "table of layouts", (Column("hash", default=""),), others=True, empty=True)
    return set(rows["hash"]) - {""}


def _chosen_on(record: Mapping[str, Any]) -> object:
    """Return the number of documents that a search chose on; None if an older one did not record it."""
    return (record.get("documents") or {}).get("chosen_on")


def _among(num_layouts: int, num_documents: object) -> str:
    """Return the words for the layouts that were scored, and for the number of documents if it is known."""
    layouts = f"{num_layouts} layout{'s' if num_layouts != 1 else ''}"
    documents = f" on {num_documents} document{'s' if num_documents != 1 else ''}" if num_documents else ""
    return f" among {layouts} scored{documents}"


def _blocks(
    data: Any, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, cache: Path, reporter: Reporter
) -> list[TokenBlocks]:
    """Read the held-out text of a recorded section ``data``, or the text of recorded files."""
    if isinstance(data, Mapping):
        config = validate(DataConfig, {**data, "separator": _separator(record)}, "the data of its recipe")
        return [load_heldout(config, tokenizer, cache, Path(), reporter)]
    if data is None or (size := record.get("block_size")) is None:
        raise UserError("its record names no text, or no size of blocks")
    separator = _separator(record)
    return [load_text(data, tokenizer, cache, Path(), block_size=size, separator=separator, reporter=reporter)]


def _separator(record: Mapping[str, Any]) -> str:
    """Return the separator of a recorded text."""
    report = SeparatorReport.parse(record.get("separator"))
    return AUTO if report is None else report.best
