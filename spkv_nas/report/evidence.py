"""Collect the measured changes of NLL of layouts, by evaluation mode, and say in sentences what is known of one."""

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from spkv_nas.artifacts import head_scores, proposal, result_tables, search_table
from spkv_nas.artifacts.comparison import BASELINES, DENSE, FULL_ATTENTION, counted_from
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import Measurement, displacement_words
from spkv_nas.base import arrays, statistics
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.ranking import MIN_DOCUMENTS
from spkv_nas.report.formatting import change, with_minus, without_folder
from spkv_nas.report.inputs import ReportInputs, ResultFile, result_files

COMPARISON = "comparison"
SEARCH = "search"
SCORES = "scores"
VERDICT = "verdict"
_UNTRAINED = "not retrained"
_BIASED = ", partly on documents that layouts were selected on, which may favour them"
_HELD_OUT = ", on held-out documents not used for selection"
_SELECTION = ", on the text that the search selected on"


@dataclass(frozen=True, eq=False)
class Result:
    """The measured change of NLL of one layout."""

    name: str  # of the layout
    delta: float  # NLL relative to the baseline of its ``Evidence``, in percent; NaN: unknown
    error: float = math.nan  # standard error of ``delta``, in percentage points; NaN: unknown
    num_global: float = math.nan  # number of global KV heads; NaN: unknown
    # Bool [L, Hkv], the global heads; None if only the layout's name is known
    mask: arrays.Mask | None = None
    nll: float = math.nan  # nats per token; NaN: unknown
    # by each criterion of the one verdict that it is from; () without one
    measured: tuple[Measurement, ...] = ()
    answer: str = ""  # of that verdict by all criteria: passes, fails or open
    share: float = math.nan  # KV cache of one sequence, of full attention's; NaN: unknown
    reach: str = ""  # ``Layout.reach`` of a layout of several windows; "" for others
    content: str = ""  # ``Layout.content_hash`` of a layout of several windows; "" for others

    @property
    def key(self) -> object:
        """Return what identifies the layout: its heads, so that two names of the same heads are one layout."""
        return (self.content or self.name) if self.mask is None else self.mask.tobytes()


@dataclass(frozen=True, eq=False)
class Evidence:
    """All results of one evaluation mode."""

    description: str  # the mode in words
    steps: float  # of retraining; NaN: unknown
    source: str  # ``COMPARISON``, ``SEARCH``, ``SCORES`` or ``VERDICT``
    baseline: str  # the row that changes count from, ``DENSE`` or ``FULL_ATTENTION`` (the control)
    results: tuple[Result, ...]  # distinct layouts, lowest NLL first
    fidelity: str = ""  # for a search, one of ``FIDELITIES``; "" otherwise
    num_documents: float = math.nan  # documents measured on; NaN: not recorded
    # number of equally long documents with the same standard error; NaN: not recorded
    effective: float = math.nan
    origin: str = ""  # name of the results, which tells modes of one description apart
    is_earlier: bool = False  # whether a verdict of other inputs has taken its place since

    @property
    def of_one_budget(self) -> tuple[Result, ...]:
        """Return the results of the number of heads that most layouts share; of its memory, with several windows."""
        budgets = pd.Series([result.num_global for result in self.results]).dropna()
        if budgets.empty:
            return self.results
        number = budgets.mode().max()
        share = next(result.share for result in self.results if result.num_global == number)
        results = []
        for result in self.results:
            if result.reach:
                is_of_budget = proposal.is_equal_memory((result.share, share))
            else:
                is_of_budget = result.num_global == number
            if is_of_budget:
                results.append(result)
        return tuple(results)

    @property
    def documents(self) -> str:
        """Return the number of documents in words; "" if it is not recorded."""
        return "" if math.isnan(self.num_documents) else f"{self.num_documents:,.0f} documents"

    @property
    def is_rankable(self) -> bool:
        """Return whether there are enough documents to rank layouts; True where their number is not recorded."""
        return not self.num_documents < MIN_DOCUMENTS

    @property
    def critical(self) -> float:
        """Return the number of standard errors on either side of a 95 % interval."""
        is_known = not math.isnan(self.effective)
        return statistics.critical_errors(self.effective if is_known else self.num_documents)


def all_evidence(inputs: ReportInputs) -> list[Evidence]:
    """Return the evidence of every mode that has results, most retraining first; each has a unique description."""
    collected = [
        *_search_evidence(inputs),
        *_comparison_evidence(inputs),
        *_score_evidence(inputs),
        *_verdict_evidence(inputs),
    ]
    # Tell equal descriptions apart by their source
    occurrences = Counter(mode.description for mode in collected)
    for index, mode in enumerate(collected):
        if occurrences[mode.description] > 1:
            where = f"in the {mode.source} {mode.origin}".rstrip()
            earlier = ", earlier" if mode.is_earlier else ""
            description = f"{mode.description}, {where}{earlier}"
            collected[index] = replace(mode, description=description)
    return sorted(collected, key=lambda mode: -math.inf if math.isnan(mode.steps) else -mode.steps)


def _search_evidence(inputs: ReportInputs) -> Iterator[Evidence]:
    """Yield the evidence of each fidelity of a search, full retraining first."""
    if inputs.search is None:
        return
    record = inputs.search_record
    rows = inputs.search
    steps_by_fidelity = record.get("steps") or {}
    # Read the numbers of held-out documents, and of those that selected
    held_out = (_number(record.get("num_documents")), _number(record.get("effective_documents")))
    selection = (_number((record.get("documents") or {}).get("chosen_on")), math.nan)
    for fidelity in reversed(search_table.FIDELITIES):
        results = _search_results(inputs, rows, fidelity)
        if not results:
            continue
        # Describe the measurement
        is_zero_shot = fidelity == "zero_shot"
        steps = 0.0 if is_zero_shot else float(steps_by_fidelity.get(fidelity, math.nan))
        number, effective = held_out if fidelity == "full" else selection
        text = {"full": _HELD_OUT, "zero_shot": _SELECTION}.get(fidelity, "")
        yield Evidence(
            _mode(steps) + text,
            steps=steps,
            source=SEARCH,
            # Zero-shot scores count from the dense model, retrained layouts from the control, trained alike
            baseline=DENSE if is_zero_shot else FULL_ATTENTION,
            results=_distinct(results),
            fidelity=fidelity,
            num_documents=number,
            effective=effective,
        )


def _search_results(inputs: ReportInputs, rows: pd.DataFrame, fidelity: str) -> list[Result]:
    """Return the layouts of the page's grid that a fidelity of a search measured."""
    delta = f"{fidelity}_delta_percent"
    results = []
    for row in rows.dropna(subset=delta).to_dict("records"):
        mask = _mask(row["heads"], inputs.table)
        if mask is None:
            continue
        num_global = float(mask.sum())
        results.append(
            Result(
                str(row["name"]),
                delta=float(row[delta]),
                error=float(row[f"{fidelity}_standard_error"]),
                num_global=num_global,
                mask=mask,
                share=inputs.cache_share(float(mask.sum() / inputs.table.num_heads)),
            )
        )
    return results


def _comparison_evidence(inputs: ReportInputs) -> Iterator[Evidence]:
    """Yield the evidence of each number of steps in the comparison."""
    if inputs.comparison is None:
        return
    baseline = counted_from(inputs.comparison)
    heldout = inputs.record.get("heldout") or {}
    is_layout = ~inputs.comparison["strategy"].isin(BASELINES)
    rows = inputs.comparison[is_layout & inputs.comparison["nll"].notna()]
    for steps, group in rows.groupby("steps", dropna=False):
        results = [_comparison_result(inputs, row) for row in group.to_dict("records")]
        yield Evidence(
            _mode(float(steps)),
            steps=float(steps),
            source=COMPARISON,
            baseline=baseline,
            results=_distinct(results),
            num_documents=_number(heldout.get("documents")),
            effective=_number(heldout.get("effective_documents")),
        )


def _comparison_result(inputs: ReportInputs, row: Mapping[Hashable, Any]) -> Result:
    """Return the result of a row of the comparison, with the heads of the page's layout of this name."""
    name = row["strategy"]
    num_global = row["num_global"]
    delta = row["delta_nll_percent"]
    error = row["delta_nll_standard_error"]
    layout = inputs.layouts.get(name)
    # Ignore a file that was replaced by a layout of another budget
    if layout is not None and num_global >= 0 and num_global != layout.num_global:
        layout = None
    if layout is not None:
        return replace(layout_result(inputs, layout, delta, error, nll=row["nll"]), name=name)
    share = math.nan
    if not math.isnan(num_global):
        share = inputs.cache_share(min(1.0, num_global / inputs.table.num_heads))
    return Result(name, delta, error, num_global, nll=row["nll"], share=share)


def _score_evidence(inputs: ReportInputs) -> Iterator[Evidence]:
    """Yield the evidence of each table of ``score``; first those on documents that selected no layout."""
    for file in sorted(inputs.scores, key=lambda file: bool(file.record.get("num_selection"))):
        results = []
        for row in file.rows[file.rows["heads"] != ""].to_dict("records"):
            layout = file.layout(str(row["strategy"]), str(row["heads"]))
            if layout is None or not _is_here(inputs, layout):
                continue
            delta = row["delta_nll_percent"]
            error = row["delta_nll_standard_error"]
            results.append(layout_result(inputs, layout, delta, error, nll=row["nll"]))
        if results:
            yield Evidence(
                _UNTRAINED + (_BIASED if file.record.get("num_selection") else ""),
                steps=0.0,
                source=SCORES,
                baseline=DENSE,
                results=_distinct(results),
                num_documents=_number(file.record.get("num_documents")),
                effective=_number(file.record.get("effective_documents")),
                origin=file.name,
            )


def _verdict_evidence(inputs: ReportInputs) -> Iterator[Evidence]:
    """Yield what each verdict says of layouts that were not retrained; NLL is unknown where it was no criterion."""
    for file in inputs.verdicts:
        results = _verdict_results(inputs, file)
        if results:
            yield Evidence(
                f"{_UNTRAINED}, by a verdict",
                steps=0.0,
                source=VERDICT,
                baseline=DENSE,
                results=_distinct(results),
                origin=file.name,
                is_earlier=file.is_earlier,
            )


def _verdict_results(inputs: ReportInputs, file: ResultFile) -> list[Result]:
    """Return the candidates of a verdict that were not retrained, and that the page can show."""
    results = []
    for name, recorded in file.record.get("layouts", {}).items():
        layout = file.layout(name, recorded["heads"])
        measured = tuple(row for row in file.measured if row.candidate == name)
        if layout is None or not measured or recorded.get("trained"):
            continue
        if not _is_here(inputs, layout):
            continue
        # Every sentence on it is made from these measurements, which have their own numbers of samples
        losses = [row.loss for row in measured if row.criterion == "nll"]
        delta = losses[0] if losses else math.nan
        answer = file.record.get("answers", {}).get(name, "open")
        results.append(layout_result(inputs, layout, delta, measured=measured, answer=answer))
    return results


def _is_here(inputs: ReportInputs, layout: Layout) -> bool:
    """Return whether a layout has the page's grid, and several windows or the window and sink tokens of its layouts."""
    if layout.heads_per_layer != inputs.table.heads_per_layer:
        return False
    if layout.windows:
        return True
    shown: Iterable[Layout | head_scores.HeadScores] = inputs.layouts.values() or (inputs.table,)
    return any(layout.window == other.window and layout.sinks == other.sinks for other in shown)


def layout_result(
    inputs: ReportInputs,
    layout: Layout,
    delta: float,
    error: float = math.nan,
    *,
    nll: float = math.nan,
    measured: tuple[Measurement, ...] = (),
    answer: str = "",
) -> Result:
    """Return a result under the name that the page's layouts give its layout."""
    # The first name of each layout
    names: dict[str, str] = {}
    for name, shown in inputs.layouts.items():
        names.setdefault(shown.hash, name)
    name = names.get(layout.hash, layout.strategy)
    # The name stands for other heads by now
    if layout.hash not in names and name in inputs.layouts:
        name = f"{name}-{layout.num_global}"
    # Layouts of several windows are known by their names alone, because their heads do not tell them apart
    has_several = bool(layout.windows)
    return Result(
        name,
        delta=delta,
        error=error,
        num_global=float(layout.num_global),
        mask=None if has_several else layout.global_mask,
        nll=nll,
        measured=measured,
        answer=answer,
        share=inputs.layout_share(layout),
        reach=layout.reach if has_several else "",
        content=layout.content_hash if has_several else "",
    )


def _distinct(results: Sequence[Result]) -> tuple[Result, ...]:
    """Sort results by change of NLL (by NLL if one is missing) and keep the first of each layout."""
    has_deltas = not any(math.isnan(result.delta) for result in results)
    ordered = sorted(results, key=lambda result: result.delta if has_deltas else result.nll)
    distinct: dict[object, Result] = {}
    for result in ordered:
        distinct.setdefault(result.key, result)
    return tuple(distinct.values())


def _mode(steps: float) -> str:
    """Return the evaluation mode in words."""
    if steps == 0:
        return _UNTRAINED
    return "retrained" if math.isnan(steps) else f"retrained for {steps:.0f} steps"


def _mask(heads: str, table: head_scores.HeadScores) -> arrays.Mask | None:
    """Return the global heads in a row of a search's table, bool [L, Hkv]; None for another grid."""
    rows = str(heads).split()
    if tuple(len(row) for row in rows) != table.heads_per_layer:
        return None
    width = table.num_kv_heads
    return np.array([[letter == "G" for letter in row.ljust(width)] for row in rows])


def _number(value: float | None) -> float:
    """Return a recorded number; NaN for a missing one."""
    return math.nan if value is None else float(value)


def layout_evidence(workspace: Workspace, checkpoint: str, layout: Layout) -> list[str]:
    """Return sentences on the verdicts and scores of a layout with the weights of a checkpoint; empty without any.

    They are for the model card of an export. Results whose numbers make no sense (``evaluation.alarms``) are left out.
    Raises ``UserError`` if a result cannot be read.
    """
    sentences: list[str] = []
    for kind in (result_tables.CRITICAL_BUDGET, result_tables.VERDICT, result_tables.SCORES):
        describe = _of_scores if kind is result_tables.SCORES else _of_verdict
        for file in result_files(workspace, kind):
            if not file.record.get(result_tables.ALARM):
                sentences += describe(file, checkpoint, layout)
    return sentences


def _of_verdict(file: ResultFile, checkpoint: str, layout: Layout) -> Iterator[str]:
    """Yield a sentence for each criterion of a verdict on the layout."""
    record = file.record
    for name, recorded in record.get("layouts", {}).items():
        judged = file.layout(name, recorded["heads"])
        is_same = judged is not None and judged.content_hash == layout.content_hash
        if not is_same or not _is_same_path(record.get("candidates", {}).get(name), checkpoint):
            continue
        for measured in file.measured:
            if measured.candidate == name:
                memory = f"{measured.memory}; " if measured.memory else ""
                displaced = "".join(f"; {each}" for each in displacement_words([measured]))
                yield (
                    f"{measured.criterion}: "
                    f"{memory}a loss of {with_minus(measured.finding)}{_text(file)}, "
                    f"against `{without_folder(measured.against)}`; "
                    f"it {measured.conclusion}{displaced}."
                )


def _of_scores(file: ResultFile, checkpoint: str, layout: Layout) -> Iterator[str]:
    """Yield a sentence on the layout's NLL with the weights as they are."""
    record = file.record
    if not _is_same_path(record.get("model"), checkpoint):
        return
    favoured = ", some of which the layout was selected on" if record.get("num_selection") else ""
    for row in file.rows[file.rows["hash"] == layout.hash].itertuples():
        yield (
            f"NLL: {change(row.delta_nll_percent, row.delta_nll_standard_error)} % against full "
            f"attention with the same weights (standard error), {row.nll:.4f} nats per token, "
            f"on {record.get('num_documents', 0):,} documents{_text(file)} in blocks of "
            f"{record.get('block_size', 0):,} tokens{favoured}."
        )


def _text(file: ResultFile) -> str:
    """Return the text of a result in words, without the folders of this machine; "" if none was read."""
    data = file.record.get("data")
    if isinstance(data, list):
        return f" of {', '.join(f'`{without_folder(str(source))}`' for source in data)}"
    if isinstance(data, str):
        return f" of the {data}"
    return "" if data is None else " of held-out text of its recipe"


def _is_same_path(recorded: object, checkpoint: str) -> bool:
    """Return whether a recorded checkpoint is the given one: the same id, or the same path."""
    return _absolute(str(recorded)) == _absolute(checkpoint)


def _absolute(path: str) -> str:
    """Return a path from the root, with ``~`` resolved."""
    return os.path.abspath(os.path.expanduser(path))
