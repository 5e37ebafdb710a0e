"""Build the page's sections on result tables: verdicts, scores, checkpoints, training-free pruning, RULER and others.

``SECTIONS`` lists them: a further section is one function and one line there. A difference is significant if
it exceeds two standard errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pandas as pd

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.result_tables import BASELINES, EVALUATION, LONGPPL, RULER, SCORES, TASKS, VERDICT, ResultTable
from spkv_nas.base.statistics import critical_errors
from spkv_nas.report.formatting import change, measured, number, without_folder
from spkv_nas.report.inputs import ResultFile
from spkv_nas.report.result_charts import baselines_chart
from spkv_nas.report.section import Row, Section
from spkv_nas.report.verdict_cards import verdict_section

_TIED, _AT_FLOOR = "not significantly different", "not above the floor"
_AVERAGE = "average of "
_EVALUATED = ("Checkpoint", "Documents", "Effective", "Tokens", "NLL", "Density, %", "Baseline", "Δ NLL, %")
_PAIR = ("Baseline", "Baseline density, %", "Difference")
_LONG = ("Domain", "Documents", "Tokens", "Key tokens", "LongPPL", "PPL", "Density, %")
_LONG_PAIR = ("Baseline", "Baseline PPL", "Baseline density, %", "Difference, %")
Record = Mapping[str, Any]


def read_benchmarks(folder: Path) -> tuple[Section, ...]:
    """Return the sections of the result tables in a folder.

    Raises:
        UserError: a table cannot be read.
    """
    results = ((kind, make_section, kind.read(folder)) for kind, make_section in SECTIONS.items())
    return tuple(
        make_section(kind.name, *rows_and_record)
        for kind, make_section, rows_and_record in results
        if rows_and_record is not None
    )


def file_section(kind: ResultTable, file: ResultFile, number: int) -> Section:
    """Return the section of a table that is not the page's own; ``number`` makes its id unique."""
    section = SECTIONS[kind](f"{kind.name}-{number}", file.rows, file.record)
    return replace(section, title=f"{section.title} ({file.name})")


def _evaluated(name: str, rows: pd.DataFrame, record: Mapping[str, Any]) -> Section:
    """Return the section of ``evaluation.csv``: a row per checkpoint."""
    labels = {row["checkpoint"]: _checkpoint_label(row) for _, row in rows.iterrows()}
    length = record.get("block_size")
    blocks = "" if length is None else f", in blocks of {length} tokens"
    return Section(
        name,
        "Checkpoints side by side",
        f"NLL in nats per token on the same held-out documents{blocks}. ΔNLL is against the checkpoint under "
        "“Baseline”, ± one standard error, paired by document. “Effective” is the number of equally long documents "
        "that would give the same standard error.",
        (),
        _EVALUATED,
        (tuple(_evaluated_row(row, labels) for _, row in rows.iterrows()),),
    )


def _evaluated_row(row: pd.Series[Any], labels: Mapping[str, str]) -> Row:
    """Return the row of one checkpoint."""
    against = str(row["against"])
    cells = (
        number(row["num_documents"], 0),
        number(row["effective_documents"], 1),
        number(row["num_tokens"], 0),
        number(row["nll"], 4),
        number(100 * row["density"], 1),
        labels.get(against, against) or "—",
        change(row["delta_nll_percent"], row["delta_nll_standard_error"]),
    )
    tied = (
        abs(row["delta_nll_percent"]) <= critical_errors(row["effective_documents"]) * row["delta_nll_standard_error"]
    )
    return Row(labels[row["checkpoint"]], cells, _TIED if tied else "")


def _checkpoint_label(row: pd.Series[Any]) -> str:
    """Return a checkpoint's name: what its run trained and the run's folder, else its path."""
    path = PurePath(str(row["checkpoint"]))
    return f"{row['variant']} ({path.parent.name})" if row["variant"] else without_folder(str(path))


def _scores(name: str, rows: pd.DataFrame, record: Record) -> Section:
    """Return the section of layouts that were scored without training; equal layouts share a row."""
    layouts, groups = rows[rows["hash"] != ""], rows.groupby("hash", sort=False)["strategy"]
    lines = [
        Row(
            " = ".join(groups.get_group(row["hash"])),
            (
                change(row["delta_nll_percent"], row["delta_nll_standard_error"]),
                number(row["nll"], 4),
                number(row["num_global"], 0),
                number(row["coverage_percent"], 2),
            ),
        )
        for row in layouts.drop_duplicates("hash").to_dict("records")
    ]
    return Section(
        name,
        "Layouts without training",
        f"NLL in nats per token of the unchanged weights with each layout, on {_text_size(record)}. ΔNLL is against "
        "full attention, ± one standard error, paired by document.",
        (),
        ("Layout", "Δ NLL, %", "NLL", "Global KV heads", "Coverage, %"),
        (tuple(lines),),
    )


def _baselines(name: str, rows: pd.DataFrame, record: Record) -> Section:
    """Return the section of pruning rules; rows are grouped by target density, then dense model and SP-KV."""
    # Group rows by target density; 2.0, 1.5 and -1.0 stand for dense, no density, and SP-KV
    kinds = rows["target_density"].where(rows["method"] != SP_KV, -1.0).where(rows["method"] != FULL_ATTENTION, 2.0)
    groups = [
        tuple(_baseline(row) for _, row in group.iterrows()) for _, group in rows.groupby(kinds.fillna(1.5), sort=False)
    ]
    protocol = "" if record.get("protocol") != "kvpress" else ", following the kvpress protocol"
    return Section(
        name,
        "Post-hoc KV-cache compression",
        "The dense model with keys evicted by training-free rules, on "
        f"{_text_size(record)}, read in chunks of {record.get('chunk', '?')} tokens{protocol}; the window of "
        f"{record.get('window', '?')} is always kept. "
        "Density is the share of keys outside the window that are kept, sinks included. ΔNLL is against the model with "
        "all keys, ± one standard error, paired by document; “not significantly different” is within two of them. "
        "SP-KV is a separate model.",
        (),
        ("Method", "Δ NLL, %", "NLL", "Sinks", "Target density, %", "Density, %", "Above the lowest there"),
        (),
        tuple(groups),
        (baselines_chart(rows),),
    )


def _baseline(row: pd.Series[Any]) -> Row:
    """Return the row of one pruning rule, or of the dense model."""
    is_dense = row["method"] == FULL_ATTENTION
    delta, error = row["delta_nll_percent"], row["delta_nll_standard_error"]
    cells = (
        "reference" if is_dense else change(delta, error),
        number(row["nll"], 4),
        number(row["sinks"], 0),
        number(100 * row["target_density"], 1),
        number(100 * row["density"], 1),
        change(row["above_lowest"], row["above_lowest_standard_error"]),
    )
    return Row(_method_label(row), cells, "" if is_dense else _significance_tag(delta, error))


def _method_label(row: pd.Series[Any]) -> str:
    """Return the name of a row's method, with the threshold of SP-KV."""
    if row["method"] == SP_KV:
        return f"SP-KV, τ = {row['tau']:g}" if row["tau"] else "SP-KV, gates open"
    return str(row["method"])


def _ruler(name: str, rows: pd.DataFrame, record: Record) -> Section:
    """Return the section of RULER: averages by length, with every task in the folded rows."""
    paired = bool(rows["against"].notna().any())
    lines = [(row["length"], row["task"], _ruler_row(row, paired=paired)) for _, row in rows.iterrows()]
    # Separate averages from tasks, and group the tasks by length
    averages = tuple(row for _, task, row in lines if task.startswith(_AVERAGE))
    tasks = [(length, row) for length, task, row in lines if not task.startswith(_AVERAGE)]
    by_length = tuple(
        tuple(row for task_length, row in tasks if task_length == length)
        for length in dict.fromkeys(task_length for task_length, _ in tasks)
    )
    haystack = record.get("haystack", "RULER's noise")
    return Section(
        name,
        "RULER",
        f"{_checkpoints(record)}Share of correct answers, ± one standard error over samples; needles are hidden in "
        f"{haystack if isinstance(haystack, str) else 'the essays provided'}. The floor is the score of the same "
        f"checkpoint with every head local to {record.get('floor_window', '?')} tokens, which it reaches without "
        "long-range attention or by chance; its standard error is not known. “Not significantly different”: "
        "within two standard errors of the baseline, paired by sample. In brackets: an exact 95 % interval, where all "
        "samples agree.",
        (),
        ("Task", "Tokens", "Samples", "Score", "Floor", "Density, %", *(_PAIR if paired else ())),
        (averages,),
        by_length,
    )


def _ruler_row(row: pd.Series[Any], *, paired: bool) -> Row:
    """Return the row of one task at one length, tagged where it does not differ from the floor or the baseline."""
    cells = (
        number(row["length"], 0),
        number(row["num_samples"], 0),
        measured(row["score"], row["standard_error"]),
        number(row["floor"], 3),
        number(100 * row["density"], 1),
        *(_pair(row) if paired else ()),
    )
    at_floor = _AT_FLOOR if row["score"] - row["floor"] <= 2 * row["standard_error"] else ""
    tags = at_floor, _significance_tag(row["difference"], row["difference_standard_error"])
    return Row(str(row["task"]), cells, ", ".join(filter(None, tags)))


def _tasks(name: str, rows: pd.DataFrame, record: Record) -> Section:
    """Return the section of lm-eval's downstream tasks."""
    paired = bool(rows["against"].notna().any())
    limit = f", the first {record['limit']} samples of each" if record.get("limit") else ""
    lines = [_task(row, paired=paired) for _, row in rows.iterrows()]
    averages = tuple(row for row in lines if row.head.startswith(_AVERAGE))
    return Section(
        name,
        "Downstream tasks",
        f"{_checkpoints(record)}By lm-eval{limit}, ± one standard error over samples. Chance-level scores are "
        "not shown. “Not significantly different”: within two standard errors of the baseline, paired by sample. In "
        "brackets: an exact 95 % interval, where all samples have the same result.",
        (),
        ("Task", "Metric", "Shots", "Samples", "Value", "Density, %", *(_PAIR if paired else ())),
        tuple(filter(None, (tuple(row for row in lines if row not in averages), averages))),
    )


def _task(row: pd.Series[Any], *, paired: bool) -> Row:
    """Return the row of one metric of a task."""
    cells = (
        str(row["metric"]),
        number(row["num_fewshot"], 0),
        number(row["num_samples"], 0),
        measured(row["value"], row["standard_error"]),
        number(100 * row["density"], 1),
        *(_pair(row) if paired else ()),
    )
    return Row(str(row["task"]), cells, _significance_tag(row["difference"], row["difference_standard_error"]))


def _longppl(name: str, rows: pd.DataFrame, record: Record) -> Section:
    """Return the section of LongPPL."""
    paired = bool(rows["against_ppl"].notna().any())
    evaluator, withheld = record.get("evaluator") or {}, record.get("withheld") or {}
    evaluator_note = f" by {without_folder(str(evaluator['model']))}" if "model" in evaluator else ""
    reasons = [f"{domain}: {reason}." for domain, reason in withheld.items()]
    return Section(
        name,
        "LongPPL",
        f"{_checkpoints(record)}Perplexity of the key tokens only, which a long context makes much likelier, chosen"
        f"{evaluator_note}; ± one standard error by document, beside the perplexity of all tokens. "
        "The SP-KV paper uses the name for its validation text, which is a different measure. “Not significantly "
        "different”: within two standard errors of the baseline, on the same key tokens.",
        tuple(reasons),
        (*_LONG, *(_LONG_PAIR if paired else ())),
        (tuple(_longppl_row(row, paired=paired) for _, row in rows.iterrows()),),
    )


def _longppl_row(row: pd.Series[Any], *, paired: bool) -> Row:
    """Return the row of one domain."""
    difference, error = row["difference_percent"], row["difference_standard_error"]
    pair = (number(row["against"], 3), number(row["against_ppl"], 3), number(100 * row["against_density"], 1))
    cells = (
        *(number(row[column], 0) for column in ("num_documents", "num_tokens", "num_keys")),
        measured(row["longppl"], row["standard_error"]),
        number(row["ppl"], 3),
        number(100 * row["density"], 1),
        *((*pair, change(difference, error)) if paired else ()),
    )
    return Row(str(row["domain"]), cells, _significance_tag(difference, error))


def _checkpoints(record: Record) -> str:
    """Return the checkpoints' names as the start of a paragraph, as far as they are recorded."""
    against = record.get("against")
    baseline = (
        f"; baseline {without_folder(str(against['model']))}"
        if isinstance(against, Mapping) and "model" in against
        else ""
    )
    return f"{without_folder(str(record['model']))}{baseline}. " if "model" in record else ""


def _pair(row: pd.Series[Any]) -> tuple[str, str, str]:
    """Return the cells of the columns ``_PAIR``."""
    difference = change(row["difference"], row["difference_standard_error"])
    return number(row["against"], 3), number(100 * row["against_density"], 1), difference


def _significance_tag(difference: float, error: float) -> str:
    """Return a tag for a difference of at most two standard errors, else "", also if either is NaN."""
    return _TIED if abs(difference) <= 2 * error else ""


def _text_size(record: Record) -> str:
    """Return the recorded size of the text in words."""
    tokens, documents = record.get("num_tokens"), record.get("num_documents")
    if tokens is None or documents is None:
        return "its text"
    return f"{tokens:,} tokens of {documents:,} documents"


# Table of results, and the function that makes its section of (name, rows, record)
SECTIONS: dict[ResultTable, Callable[[str, pd.DataFrame, Record], Section]] = {
    VERDICT: verdict_section,
    SCORES: _scores,
    EVALUATION: _evaluated,
    BASELINES: _baselines,
    RULER: _ruler,
    TASKS: _tasks,
    LONGPPL: _longppl,
}
