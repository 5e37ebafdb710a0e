"""Decide whether candidates keep up with a dense model, to ``reports/<name>/verdict.csv``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import layout_names
from spkv_nas.artifacts.result_tables import ALARM, VERDICT
from spkv_nas.base.console import out, print_path
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.evaluation.verdict.contenders import Contender
from spkv_nas.evaluation.verdict.margins import parse_risk
from spkv_nas.evaluation.verdict.trial import Verdict, judge
from spkv_nas.evaluation.verdict.words import basis, conclusion, shared_by
from spkv_nas.model.checkpoint import read_config
from spkv_nas.model.config_section import saved_layout
from spkv_nas.model.source import resolve
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.checkpoints import check_pair
from spkv_nas.stages.checks import check
from spkv_nas.stages.judging import format_interval, format_loss, is_layout, origin, prepare
from spkv_nas.stages.names import model_name
from spkv_nas.stages.printing import show_alarm
from spkv_nas.stages.verdict.options import VerdictOptions


@dataclass(frozen=True)
class VerdictResult(Verdict):
    """Result of ``verdict``.

    Attributes:
        name: name of the results.
        against: the dense checkpoint.
        num_left_out: number of documents that a layout was selected on, which were left out; None: no text was read.
        records: what selected the layouts.
        unrecorded: layouts whose selection documents are not known, or not all of them.
        folder: folder of the table.
        candidates: the candidates.
    """

    name: str
    against: str
    num_left_out: int | None
    records: Sequence[str]
    unrecorded: Sequence[str]
    folder: Path
    candidates: Sequence[Contender]

    @property
    def layouts(self) -> dict[str, Layout]:
        """Return the layout of each candidate that has one, by name."""
        return {each.name: each.chosen for each in self.candidates if each.chosen is not None}


def verdict(options: VerdictOptions, reporter: Reporter = SILENT) -> VerdictResult:
    """Measure candidates and the dense model until the answer about every candidate is known.

    Raises:
        UserError: all documents were used to select a layout, two models differ in their tokenizer, or something
            cannot be read.
    """
    quiet_transformers(reporter)
    check(options)
    candidates = contenders(options.candidates, options.model, reporter)
    for candidate in candidates:
        check_pair(candidate.source, options.model)
    prepared = prepare(options, candidates, [Path(text) for text in options.candidates], reporter)
    found = judge(prepared.trial, candidates, parse_risk(options.risk), reporter)
    # Write the table
    record = {"answers": dict(found.answers), **origin(options, prepared, candidates)}
    record |= {} if found.alarm is None else {ALARM: found.alarm}
    folder = options.folders.report_dir(prepared.name)
    VERDICT.write(folder, found.rows, record, reporter)
    return VerdictResult(
        **vars(found),
        name=prepared.name,
        against=options.model,
        num_left_out=prepared.num_left_out,
        records=prepared.selected.by,
        unrecorded=prepared.selected.unknown,
        folder=folder,
        candidates=candidates,
    )


def contenders(texts: Sequence[str], dense: str, reporter: Reporter) -> list[Contender]:
    """Return the candidates that files and checkpoints name, under different names (``layout_names``), each once."""
    candidates: dict[tuple[str, str], tuple[str, Contender]] = {}
    for text in texts:
        layout = Layout.read(text) if is_layout(text) else None
        source, chosen = (text, _layout_of(text)) if layout is None else (dense, layout)
        candidate = Contender(model_name(text) if layout is None else layout.strategy, source, layout, chosen)
        first, _ = candidates.setdefault(candidate.content, (text, candidate))
        if first != text:
            reporter.announce(f"{text} is the same as {first}: judged once")
    names = iter(layout_names([(Path(text), each.layout) for text, each in candidates.values() if each.layout]))
    named: list[Contender] = []
    for text, candidate in candidates.values():
        name = next(names) if candidate.layout else candidate.name
        named.append(replace(candidate, name=text if any(other.name == name for other in named) else name))
    return named


def _layout_of(source: str) -> Layout | None:
    """Return the layout of a checkpoint, from its config alone; None if it has none."""
    return saved_layout(read_config(str(resolve(source)), f"model {source}"))


def show(result: VerdictResult) -> None:
    """Print the table, the verdict on each candidate, and what it rests on."""
    show_alarm(result.alarm)
    grid = Table(
        "candidate",
        "global heads",
        "criterion",
        "loss",
        "interval",
        "margin",
        "samples",
        "result",
        title=f"{escape(result.name)}: loss against {escape(result.against)}",
    )
    for row in result.rows.itertuples():
        samples = f"{row.num_samples} {result.nouns[row.criterion]}"
        cells = (
            row.candidate,
            f"{layout.num_global} of {layout.num_heads}" if (layout := result.layouts.get(row.candidate)) else "-",
            row.criterion,
            format_loss(row.loss),
            format_interval(row.low, row.high),
            f"{row.margin:g} {row.unit}",
            samples,
            row.answer,
        )
        grid.add_row(*map(escape, map(str, cells)))
    out.print(grid)
    for line in _sentences(result):
        out.print(line)
    print_path("verdict", result.folder / "verdict.csv")


def document(result: VerdictResult) -> dict[str, Any]:
    """Return what ``--json`` prints: the answers, the table, and the sentences."""
    return {
        "name": result.name,
        "against": result.against,
        "alarm": result.alarm,
        "answer": result.answer,
        "answers": result.answers,
        "criteria": result.rows.astype(object).where(result.rows.notna(), None),
        "sentences": [Text.from_markup(line).plain for line in _sentences(result)],
        "risk": result.risk,
        "left_out": {"documents": result.num_left_out, "selected_by": result.records},
        "unrecorded": result.unrecorded,
        "folder": result.folder,
    }


def _sentences(result: VerdictResult) -> list[str]:
    """Return the verdict on each candidate, and what it rests on."""
    rests_on = basis(
        result.risk, shared_by(len(result.answers)), result.num_left_out, result.records, result.unrecorded
    )
    return [*(_sentence(result, name) for name in result.answers), escape(rests_on)]


def _sentence(result: VerdictResult, name: str) -> str:
    """Return the verdict on a candidate."""
    rows = result.rows[result.rows["candidate"] == name]
    verb, reason = conclusion(rows, result.answers[name], result.nouns, result.num_samples)
    return f"[bold]{escape(name)} {verb}[/bold]: {escape(reason)}"
