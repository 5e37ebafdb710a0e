"""Build the page's sections on result tables: one function and one line in ``SECTIONS`` each."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pandas as pd

from spkv_nas.artifacts import comparison, result_tables
from spkv_nas.base.statistics import critical_errors
from spkv_nas.report import chart, inputs, result_charts, verdict_cards
from spkv_nas.report.formatting import change, measured, number, without_folder

Record = Mapping[str, Any]
Line = dict[str, Any]  # a row of a result table, by column
Cell = Callable[[Line], str]
_TIED = "not significantly different"
_AVERAGE = "average of "
_DELTA = ("delta_nll_percent", "delta_nll_standard_error")


def _digits(column: str, digits: int, factor: float = 1.0) -> Cell:
    """Return a function that formats a column of a row, times a factor."""
    return lambda line: number(factor * line[column], digits)


def _with_error(column: str, error: str, form: Callable[[float, float], str] = change) -> Cell:
    """Return a function that formats a column of a row with its standard error."""
    return lambda line: form(line[column], line[error])


def _delta(line: Line) -> str:
    """Format the change of NLL of a row, or say that it is the reference."""
    column, error = _DELTA
    return line.get("reference") or change(line[column], line[error])


# Title and cell of every column that sections show
_COLUMNS: dict[str, tuple[str, Cell]] = {
    "against": ("Baseline", _digits("against", 3)),
    "against_density": ("Baseline density, %", _digits("against_density", 1, 100)),
    "against_ppl": ("Baseline PPL", _digits("against_ppl", 3)),
    "checkpoint": ("Baseline", lambda line: line["label"]),
    "coverage": ("Coverage, %", _digits("coverage_percent", 2)),
    "delta": ("Δ NLL, %", _delta),
    "density": ("Density, %", _digits("density", 1, 100)),
    "difference": ("Difference", _with_error("difference", "difference_standard_error")),
    "difference_percent": (
        "Difference, %",
        _with_error("difference_percent", "difference_standard_error"),
    ),
    "documents": ("Documents", _digits("num_documents", 0)),
    "effective": ("Effective", _digits("effective_documents", 1)),
    "floor": ("Floor", _digits("floor", 3)),
    "global": ("Global KV heads", _digits("num_global", 0)),
    "keys": ("Key tokens", _digits("num_keys", 0)),
    "kv_cache": ("KV cache, %", _digits("kv_cache_percent", 1)),
    "length": ("Tokens", _digits("length", 0)),
    "longppl": ("LongPPL", _with_error("longppl", "standard_error", measured)),
    "metric": ("Metric", lambda line: str(line["metric"])),
    "nll": ("NLL", _digits("nll", 4)),
    "ppl": ("PPL", _digits("ppl", 3)),
    "samples": ("Samples", _digits("num_samples", 0)),
    "score": ("Score", _with_error("score", "standard_error", measured)),
    "shots": ("Shots", _digits("num_fewshot", 0)),
    "sinks": ("Sinks", _digits("sinks", 0)),
    "target": ("Target density, %", _digits("target_density", 1, 100)),
    "tokens": ("Tokens", _digits("num_tokens", 0)),
    "value": ("Value", _with_error("value", "standard_error", measured)),
}


def read_benchmarks(folder: Path) -> tuple[chart.Section, ...]:
    """Return the sections of the result tables in a folder. Raises ``UserError``: a table cannot be read."""
    sections = []
    for kind, make in SECTIONS.items():
        table = kind.read(folder)
        if table is not None:
            rows, record = table
            sections.append(make(kind.name, rows, record))
    return tuple(sections)


def file_section(
    kind: result_tables.ResultTable, file: inputs.ResultFile, number: int
) -> chart.Section:
    """Return the section of a table that is not the page's own; ``number`` makes its id unique."""
    section = SECTIONS[kind](f"{kind.name}-{number}", file.rows, file.record)
    return replace(section, title=f"{section.title} ({file.name}, {file.path.name})")


def _section(
    name: str,
    title: str,
    about: str,
    rows: pd.DataFrame,
    *,
    first: str,
    columns: str,
    findings: tuple[str, ...] = (),
    charts: tuple[chart.Chart, ...] = (),
) -> chart.Section:
    """Return the section of a result table; ``columns`` are names of ``_COLUMNS``, ``first`` titles the one before.

    ``rows`` have a column ``head`` and, if they are needed, ``tag``, ``group`` (rows between two lines) and ``folded``.
    """
    names = columns.split()
    shown: dict[object, list[chart.Row]] = {}
    folded: dict[object, list[chart.Row]] = {}
    for line in rows.to_dict("records"):
        cells = tuple(_COLUMNS[column][1](line) for column in names)
        row = chart.Row(str(line["head"]), cells, line.get("tag", ""))
        groups = folded if line.get("folded", False) else shown
        groups.setdefault(line.get("group"), []).append(row)
    return chart.Section(
        name,
        title,
        about,
        (first, *(_COLUMNS[column][0] for column in names)),
        tuple(tuple(group) for group in shown.values()),
        findings=findings,
        folded=tuple(tuple(group) for group in folded.values()),
        charts=charts,
    )


def _ties(
    rows: pd.DataFrame, column: str, error: str, critical: "pd.Series[float] | float" = 2.0
) -> list[str]:
    """Return a tag for every difference of at most ``critical`` standard errors, else "", also if either is NaN."""
    is_tied = rows[column].abs() <= critical * rows[error]
    return [_TIED if tied else "" for tied in is_tied]


def _evaluated(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of ``evaluation.csv``: a row per checkpoint."""
    # Name checkpoints after what their run trained and the run's folder, else by their path
    labels = {}
    for path, variant in zip(rows["checkpoint"].astype(str), rows["variant"], strict=True):
        run = PurePath(path).parent.name
        labels[path] = f"{variant} ({run})" if variant else without_folder(path)
    length = record.get("block_size")
    critical = rows["effective_documents"].map(critical_errors)
    blocks = "" if length is None else f", in blocks of {length} tokens"
    return _section(
        name,
        "Checkpoints side by side",
        f"NLL in nats per token on the same held-out documents{blocks}. "
        "ΔNLL is against the checkpoint under “Baseline”, ± one standard error, "
        "paired by document. “Effective” is the number of equally long documents that would give "
        "the same standard error.",
        rows.assign(
            head=rows["checkpoint"].astype(str).map(labels),
            label=[labels.get(str(path), str(path)) or "—" for path in rows["against"]],
            tag=_ties(rows, *_DELTA, critical),
        ),
        first="Checkpoint",
        columns="documents effective tokens nll density checkpoint delta",
    )


def _scores(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of layouts that were scored without training; equal layouts share a row."""
    names = rows.groupby("hash", sort=False)["strategy"].agg(" = ".join)
    layouts = rows[rows["hash"] != ""].drop_duplicates("hash")
    return _section(
        name,
        "Layouts without training",
        "NLL in nats per token of the unchanged weights with each layout, "
        f"on {_text_size(record)}. ΔNLL is against full attention, ± one standard error, "
        "paired by document.",
        layouts.assign(head=layouts["hash"].map(names)),
        first="Layout",
        columns="delta nll global kv_cache coverage",
    )


def _baselines(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of pruning rules; rows are grouped by target density, then dense model and SP-KV."""
    protocol = "" if record.get("protocol") != "kvpress" else ", following the kvpress protocol"
    # Separate the dense model and SP-KV from the pruning rules
    is_dense = rows["method"] == comparison.FULL_ATTENTION
    is_spkv = rows["method"] == comparison.SP_KV
    spkv = [f"SP-KV, τ = {tau:g}" if tau else "SP-KV, gates open" for tau in rows["tau"]]
    return _section(
        name,
        "Post-hoc KV-cache compression",
        f"The dense model with keys evicted by training-free rules, on {_text_size(record)}, "
        f"read in chunks of {record.get('chunk', '?')} tokens{protocol}; "
        f"the window of {record.get('window', '?')} is always kept. "
        "Density is the share of keys outside the window that are kept, sinks included. "
        "ΔNLL is against the model with all keys, ± one standard error, paired by document; "
        "“not significantly different” is within two of them. SP-KV is a separate model.",
        rows.assign(
            head=rows["method"].mask(is_spkv, pd.Series(spkv, rows.index)),
            reference=["reference" if dense else "" for dense in is_dense],
            tag=pd.Series(_ties(rows, *_DELTA), rows.index).mask(is_dense, ""),
            group=rows["target_density"].astype(str).mask(is_dense | is_spkv, rows["method"]),
            folded=True,
        ),
        first="Method",
        columns="delta nll sinks target density",
        charts=(result_charts.baselines_chart(rows),),
    )


def _ruler(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of RULER: averages by length, with every task in the folded rows."""
    haystack = record.get("haystack", "RULER's noise")
    place = haystack if isinstance(haystack, str) else "the essays provided"
    is_average = rows["task"].str.startswith(_AVERAGE)
    # Mark scores at the floor, and ties with the baseline
    at_floor = rows["score"] - rows["floor"] <= 2 * rows["standard_error"]
    ties = _ties(rows, "difference", "difference_standard_error")
    tags = []
    for is_low, tie in zip(at_floor, ties, strict=True):
        marks = ["not above the floor" if is_low else "", tie]
        tags.append(", ".join(mark for mark in marks if mark))
    return _section(
        name,
        "RULER",
        f"{_checkpoints(record)}Share of correct answers, ± one standard error over samples; "
        f"needles are hidden in {place}. The floor is the score of the same checkpoint with every "
        f"head local to {record.get('floor_window', '?')} tokens, "
        "which it reaches without long-range attention or by chance; "
        "its standard error is not known. “Not significantly different”: "
        "within two standard errors of the baseline, paired by sample. In brackets: "
        "an exact 95 % interval, where all samples agree.",
        rows.assign(
            head=rows["task"],
            tag=tags,
            group=rows["length"].mask(is_average, 0),
            folded=~is_average,
        ),
        first="Task",
        columns=f"length samples score floor density {_pair(rows)}",
    )


def _tasks(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of lm-eval's downstream tasks, the averages last."""
    limit = f", the first {record['limit']} samples of each" if record.get("limit") else ""
    ties = _ties(rows, "difference", "difference_standard_error")
    is_average = rows["task"].str.startswith(_AVERAGE)
    return _section(
        name,
        "Downstream tasks",
        f"{_checkpoints(record)}By lm-eval{limit}, ± one standard error over samples. "
        "Chance-level scores are not shown. “Not significantly different”: "
        "within two standard errors of the baseline, paired by sample. In brackets: "
        "an exact 95 % interval, where all samples have the same result.",
        rows.assign(head=rows["task"], tag=ties, group=is_average).sort_values(
            "group", kind="stable"
        ),
        first="Task",
        columns=f"metric shots samples value density {_pair(rows)}",
    )


def _longppl(name: str, rows: pd.DataFrame, record: Record) -> chart.Section:
    """Return the section of LongPPL by domain; domains without a result are named with the reason."""
    evaluator = record.get("evaluator") or {}
    withheld = record.get("withheld") or {}
    evaluator_note = ""
    if "model" in evaluator:
        evaluator_note = f" by {without_folder(str(evaluator['model']))}"
    ties = _ties(rows, "difference_percent", "difference_standard_error")
    # Add columns if there is a baseline
    columns = "documents tokens keys longppl ppl density"
    if rows["against_ppl"].notna().any():
        columns += " against against_ppl against_density difference_percent"
    return _section(
        name,
        "LongPPL",
        f"{_checkpoints(record)}Perplexity of the key tokens only, "
        f"which a long context makes much likelier, chosen{evaluator_note}; "
        "± one standard error by document, beside the perplexity of all tokens. "
        "The SP-KV paper uses the name for its validation text, which is a different measure. "
        "“Not significantly different”: within two standard errors of the baseline, "
        "on the same key tokens.",
        rows.assign(head=rows["domain"], tag=ties),
        first="Domain",
        columns=columns,
        findings=tuple(f"{domain}: {reason}." for domain, reason in withheld.items()),
    )


def _checkpoints(record: Record) -> str:
    """Return the checkpoints' names as the start of a paragraph, as far as they are recorded."""
    if "model" not in record:
        return ""
    names = without_folder(str(record["model"]))
    against = record.get("against")
    if isinstance(against, Mapping) and against.get("model") is not None:
        names += f"; baseline {without_folder(str(against['model']))}"
    return f"{names}. "


def _pair(rows: pd.DataFrame) -> str:
    """Return the names of the columns on the baseline, if a row was compared with one."""
    return "against against_density difference" if rows["against"].notna().any() else ""


def _text_size(record: Record) -> str:
    """Return the recorded size of the text in words."""
    tokens = record.get("num_tokens")
    documents = record.get("num_documents")
    if tokens is None or documents is None:
        return "its text"
    return f"{tokens:,} tokens of {documents:,} documents"


# Table of results, and the function that makes its section of (name, rows, record)
SECTIONS: dict[result_tables.ResultTable, Callable[[str, pd.DataFrame, Record], chart.Section]] = {
    result_tables.VERDICT: verdict_cards.verdict_section,
    result_tables.CRITICAL_BUDGET: verdict_cards.budget_section,
    result_tables.SCORES: _scores,
    result_tables.EVALUATION: _evaluated,
    result_tables.BASELINES: _baselines,
    result_tables.RULER: _ruler,
    result_tables.TASKS: _tasks,
    result_tables.LONGPPL: _longppl,
}
