"""Write the study's tables: CSV files, and README.md below a marker; the text above the marker is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from references import Subject
from tables import (
    CHOOSING,
    ORDER,
    RUNNING,
    delta_table,
    difference_table,
    missing,
    plain_sinks,
    results,
)

from spkv_nas.base.files import read_text, write_atomic
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import write_csv

MARKER = "<!-- `run.py tables` writes everything below -->"
_NOTED = {
    "chosen_on": "tokens for selection",
    "judged_on": "tokens for evaluation",
    "judged_documents": "documents for evaluation",
}
_DELTA = (
    "ΔNLL counts from the dense model as it is. ± one standard error, paired by document. Layouts of whole layers may "
    "have another number of heads, shown in parentheses."
)
_VERDICT = (
    "In points of ΔNLL; negative values are better. ± one standard error, paired by document; **bold**: more than two "
    "from 0."
)
_QUESTIONS = {
    ORDER: (
        "Does the order of signals depend on sinks?",
        "Every choice of heads minus that of head gates, both with the same sinks. ",
    ),
    CHOOSING: (
        "Is choosing with a sink token better than choosing without?",
        "Heads chosen with one sink token, minus heads chosen without, both run alike. ",
    ),
    RUNNING: (
        "What are sinks worth?",
        "Layouts with other sinks minus the layout of the same signal or rule with one sink token. ",
    ),
}


def write_tables(subjects: Sequence[Subject], folder: Path) -> None:
    """Write both tables as CSV, if there are results, and README.md with them to ``folder``."""
    found = [
        result for subject in subjects if subject.note.is_file() for result in results(subject)
    ]
    deltas, differences = delta_table(found), difference_table(found)
    # Compose the page, keeping the text above the marker
    sections = [_references(subjects), *_costs(deltas)]
    for question, (title, explanation) in _QUESTIONS.items():
        part = differences[differences["question"] == question]
        sections += [f"## {title}", explanation + _VERDICT, _grid(part, _difference)]
    lines = "\n".join(f"- {line}" for line in missing(subjects, found))
    sections += ["## Not finished", lines or "Nothing: the whole plan is finished."]
    file = folder / "README.md"
    above = read_text(file, "page").partition(MARKER)[0] if file.is_file() else "# The study\n\n"
    # Write everything
    page = "\n\n".join(sections)
    with replacing(folder, stale=["delta-nll.csv", "differences.csv"]) as new:
        for name, rows in {"delta-nll": deltas, "differences": differences}.items():
            if len(rows):
                write_csv(new / f"{name}.csv", rows)
        write_atomic(new / "README.md", f"{above}{MARKER}\n\n{page}\n")


def _references(subjects: Sequence[Subject]) -> str:
    """Write the section of the references that are prepared."""
    rows = []
    for subject in subjects:
        if subject.note.is_file():
            note = subject.facts()
            numbers = (f"{note[key]:,}" for key in _NOTED)
            sinks = (f"{100 * note['sink_mass']:.1f} %", note["sinks"])
            rows.append([subject.name, "{} x {}".format(*note["grid"]), *sinks, *numbers])
    sink_columns = ("attention on the first token", "sink tokens (`--sinks auto`)")
    return f"## References\n\n{markdown(['reference', 'layers x KV heads', *sink_columns, *_NOTED.values()], rows)}"


def _costs(deltas: pd.DataFrame) -> list[str]:
    """Write the sections of ΔNLL, one per budget and number of steps."""
    text = []
    for (budget, steps), part in deltas.groupby(["budget", "steps"], sort=False):
        title = f"retrained for {steps} steps" if steps else "not retrained"
        text += [f"## ΔNLL %, {budget} of the heads, {title}", _DELTA]
        if steps:
            controls = part.drop_duplicates("reference")
            shown = (
                f"{row.reference} {row.control_percent:+.2f} ± {row.control_error:.2f}"
                for row in controls.itertuples()
            )
            text.append(f"Full attention after the same steps: {', '.join(shown)}.")
        text.append(_grid(part, _change))
        if steps:
            text += [
                "The same layouts minus that full attention, in points:",
                _grid(part, _from_control),
            ]
    return text


def _grid(rows: pd.DataFrame, cell: Callable[[pd.Series], str]) -> str:
    """Format a table with a line per chooser and sinks, and a column per reference."""
    references = list(dict.fromkeys(rows["reference"]))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    has_budgets = rows.groupby(["budget", "steps"]).ngroups > 1
    for _, row in rows.iterrows():
        where = (
            (row["budget"], "" if not row["steps"] else f"{row['steps']} steps")
            if has_budgets
            else ()
        )
        lines.setdefault((*where, row["chooser"], _sinks(row)), {})[row["reference"]] = cell(row)
    head = [*(("heads", "retrained") if has_budgets else ()), "heads by", "sinks", *references]
    return markdown(
        head,
        [[*key, *(cells.get(name, "") for name in references)] for key, cells in lines.items()],
    )


def _sinks(row: pd.Series) -> str:
    """Format the sinks of a layout: those that it runs with, and those that it was chosen with if they differ."""
    is_plain = row["chosen"] in ("", str(plain_sinks(row["run"])))
    return row["run"] if is_plain else f"{row['run']}, chosen with {row['chosen']}"


def _change(row: pd.Series) -> str:
    """Format a ΔNLL, with the number of heads if it differs from the budget."""
    head_count = f" ({row['heads']} heads)" if row["heads"] != row["asked"] else ""
    return f"{row['delta_nll_percent']:+.2f} ± {row['standard_error']:.2f}{head_count}"


def _from_control(row: pd.Series) -> str:
    """Format the change from full attention after the same steps."""
    return f"{row['from_control_points']:+.2f} ± {row['from_control_error']:.2f}"


def _difference(row: pd.Series) -> str:
    """Format a difference, in bold if it is clear."""
    text = f"{row['difference_points']:+.2f} ± {row['standard_error']:.2f}"
    return {"level": text, "same layout": "same heads"}.get(row["verdict"], f"**{text}**")


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a Markdown table; "Nothing yet." without rows."""
    if not rows:
        return "Nothing yet."
    lines = [list(map(str, line)) for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
