"""Find the documents that chose a layout, which must not judge it.

A layout was chosen on the text that its probe, a search, or ``score`` measured, if the workspace has a record of it.
All documents of that text are left out, also where only a part of their tokens was measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from spkv_nas.artifacts.defaults import SCORING_TOKENS
from spkv_nas.artifacts.head_scores import RECORD
from spkv_nas.artifacts.kinds import DENSITY
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import Reporter
from spkv_nas.base.records import read_unchecked
from spkv_nas.data.config import DataConfig
from spkv_nas.data.splits import load_heldout, load_text
from spkv_nas.model.checkpoint import read_gates
from spkv_nas.probing.registry import SIGNALS
from spkv_nas.stages.options import REFERENCE
from spkv_nas.stages.record import read_options
from spkv_nas.stages.subject import Subject
from spkv_nas.stages.verdict.options import VerdictOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spkv_nas.data.blocks import TokenBlocks


@dataclass(frozen=True)
class Choice:
    """Documents that chose layouts.

    Attributes:
        documents: ids of the documents.
        records: what chose the layouts, such as "probe mine".
        unrecorded: names of layouts of which no record says what chose them.
    """

    documents: frozenset[str]
    records: tuple[str, ...]
    unrecorded: tuple[str, ...]


def find_choice(
    options: VerdictOptions,
    layouts: Mapping[str, Layout],
    tokenizer: PreTrainedTokenizerBase,
    reporter: Reporter,
) -> Choice:
    """Read the text of every record that chose one of ``layouts``, by name, to find its documents.

    Raises:
        UserError: a recorded text cannot be read any more, so that its documents are unknown.
    """
    documents: set[str] = set()
    records: dict[str, None] = {}
    unrecorded = []
    for name, layout in layouts.items():
        texts = dict(_texts(options, layout, tokenizer, reporter))
        for record, read in texts.items():
            if record in records:
                continue
            try:
                documents.update(*map(_ids, read()))
            except UserError as error:
                raise UserError(
                    f"the text of {record}, which chose {name}, cannot be read: {first_line(error)}\n"
                    "so its documents cannot be left out; restore the text, or judge in another workspace"
                ) from error
            records[record] = None
        if not texts:
            unrecorded.append(name)
    return Choice(frozenset(documents), tuple(records), tuple(unrecorded))


def _ids(blocks: TokenBlocks) -> Iterator[str]:
    """Yield the ids of the documents that blocks have tokens of."""
    infos = tuple(blocks.documents)
    for index in np.unique(blocks.document):
        yield infos[index].id


_Text = tuple[str, Any]  # name of a record; function without arguments that returns its blocks


def _texts(
    options: VerdictOptions, layout: Layout, tokenizer: PreTrainedTokenizerBase, reporter: Reporter
) -> Iterator[_Text]:
    """Yield the records that chose a layout, each with a function that reads its text."""
    yield from _probe_text(options, layout, tokenizer, reporter)
    # Searches and scores of the workspace that have the layout
    workspace = options.folders
    for folder in sorted((workspace.root / "reports").glob("*")):
        for name, kind in (("search", "search"), ("zero-shot", "score")):
            if not _lists(folder / f"{name}.csv", layout):
                continue
            record = read_unchecked(folder / f"{name}.yaml", name)
            recipe = record.get("recipe")
            data = recipe.get("data") if isinstance(recipe, Mapping) else record.get("data")
            cache = workspace.run_dir(folder.name) / "blocks"
            yield (
                f"{kind} {folder.name}",
                lambda data=data, record=record, cache=cache: _blocks(data, record, tokenizer, cache, reporter),
            )


def _probe_text(
    options: VerdictOptions, layout: Layout, tokenizer: PreTrainedTokenizerBase, reporter: Reporter
) -> Iterator[_Text]:
    """Yield the text of the probe that a layout's provenance names, if the workspace has its record."""
    workspace, name = options.folders, _probe_of(options, layout)
    if name not in workspace.probes():
        return
    record = read_unchecked(workspace.probe_dir(name) / RECORD, "probe")
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
        train, whole = subject.read(tokenizer, reporter, learns=learns)
        if signal.computes_logits and probe.max_tokens is None:
            whole = whole.spread(max(1, SCORING_TOKENS // whole.block_size))
        return [whole] if train is None else [train, whole]

    yield f"probe {name}", read


def _probe_of(options: VerdictOptions, layout: Layout) -> str:
    """Return the probe that a layout's provenance names, or for a checkpoint's that of the workspace's equal layout."""
    if "probe" in layout.provenance:
        return str(layout.provenance["probe"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files that were edited, and are not candidates
        for file in sorted((options.folders.root / "layouts").rglob("*.yaml")):
            with suppress(UserError):
                other = Layout.read(file)
                if other.content == layout.content and "probe" in other.provenance:
                    return str(other.provenance["probe"])
    return ""


def _lists(table: Path, layout: Layout) -> bool:
    """Return whether a table of a search or of scores has a row of the layout."""
    if not table.is_file():
        return False
    rows = pd.read_csv(table, dtype=str, keep_default_na=False)
    return "hash" in rows and layout.hash in set(rows["hash"])


def _blocks(
    data: Any, record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, cache: Path, reporter: Reporter
) -> list[TokenBlocks]:
    """Read the held-out text of a recorded section ``data``, or the text of recorded files."""
    if isinstance(data, Mapping):
        config = DataConfig.model_validate(data)
        return [load_heldout(config, tokenizer, cache, Path(), reporter)]
    if not isinstance(data, list):
        raise UserError("its record names no text")
    return [load_text(data, tokenizer, cache, Path(), block_size=int(record["block_size"]), reporter=reporter)]
