"""Write the study's tables: CSV files, and README.md below a marker; the text above the marker is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from figure import figure_name, price_figure
from references import Subject
from signals import COST, SECONDS
from tables import (
    RETRAINED,
    ZERO_SHOT,
    correlation_table,
    cost_table,
    curve_table,
    delta_table,
    difference_table,
    judged,
    missing,
    rank_table,
    with_mean_of_random,
)

from spkv_nas.base.files import read_text, write_atomic
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import write_csv
from spkv_nas.report.plot import save_chart
from spkv_nas.training.branch_config import BranchConfig

MARKER = "<!-- `run.py tables` writes everything below -->"
_TITLES = {ZERO_SHOT: "without training", RETRAINED: "retrained"}


def write_tables(subjects: Sequence[Subject], folder: Path) -> None:
    """Write every non-empty table as CSV, the figures, and README.md with all of them to ``folder``."""
    prepared = [subject for subject in subjects if subject.note.is_file()]
    # Build the tables and figures from finished results
    results = [result for subject in prepared for result in judged(subject)]
    deltas = delta_table(results)
    tables = {
        "delta-nll": deltas,
        "ranks": rank_table(deltas),
        "differences": difference_table(results),
        "correlations": correlation_table(results),
        "costs": cost_table(prepared),
        "curves": curve_table(prepared),
    }
    figures = [figure for figure in map(price_figure, prepared) if figure is not None]
    # Compose the page, keeping the text above the marker
    figure_links = [_READING, *(f"![{figure.heading}]({figure.name}.png)" for figure in figures)] if figures else []
    page = "\n\n".join(
        [
            _references(prepared),
            *figure_links,
            *_text(tables, subjects[0].plan.retrain.branch),
            _unfinished(missing(subjects, results)),
        ]
    )
    file = folder / "README.md"
    above = read_text(file, "page").partition(MARKER)[0] if file.is_file() else "# The study\n\n"
    # Write everything
    pictures = [f"{figure_name(subject.name)}.{suffix}" for subject in subjects for suffix in ("png", "svg")]
    with replacing(folder, stale=[*(f"{name}.csv" for name in tables), *pictures]) as new:
        for figure in figures:
            save_chart(new, figure)
        for name, rows in tables.items():
            if len(rows):
                write_csv(new / f"{name}.csv", rows)
        write_atomic(new / "README.md", f"{above}{MARKER}\n\n{page}\n")


def _references(subjects: Sequence[Subject]) -> str:
    """Write the section of the references."""
    rows = []
    for subject in subjects:
        note = subject.check()
        grid, numbers = "{} x {}".format(*note["grid"]), (f"{note[key]:,}" for key in _NOTED)
        rows.append([subject.name, grid, *numbers])
    return f"## References\n\n{markdown(['reference', 'layers x KV heads', *_NOTED.values()], rows)}"


def _text(tables: dict[str, pd.DataFrame], branch: Mapping[str, Any]) -> list[str]:
    """Write the sections of the tables; ``branch`` is the training configuration of retrained layouts."""
    counted = {ZERO_SHOT: "ΔNLL counts from the dense model as it is. ", RETRAINED: _counted_from_control(branch)}
    text = []
    shown = with_mean_of_random(tables["delta-nll"])
    # ΔNLL by fidelity and budget, and mean ranks
    for fidelity, title in _TITLES.items():
        of_fidelity = shown[shown["fidelity"] == fidelity]
        for budget, part in of_fidelity.groupby("budget", sort=False):
            head = f"## ΔNLL %, {title}, {budget} of the heads"
            text += [head, counted[fidelity] + _DELTA, _grid(part, "chooser", ["reference"], _change)]
    text += ["## Mean rank", _ranks(tables["ranks"])]
    # Differences and correlations
    differences = tables["differences"]
    for (fidelity, name), part in differences.groupby(["fidelity", "chooser"], sort=False):
        head = f"## {name} minus other methods, {_TITLES[str(fidelity)]}, % of NLL"
        text += [head, _VERDICT, _grid(part, "rival", ["reference", "budget"], _difference)]
    for fidelity, part in tables["correlations"].groupby("fidelity", sort=False):
        head = f"## Spearman of coverage with ΔNLL, {_TITLES[str(fidelity)]}"
        about = counted[str(fidelity)] + _CORRELATION
        text += [head, about, _grid(part, "coverage_by", ["reference", "budget"], _rho)]
    # Costs and curves
    text += ["## Cost of the signals", _COST, _grid(tables["costs"], "signal", ["reference"], _cost)]
    if len(tables["curves"]):
        text += ["## Learning on a frozen model: steps, tokens, lengths, windows", _CURVES, _curves(tables["curves"])]
    return text


def _counted_from_control(branch: Mapping[str, Any]) -> str:
    """State what the ΔNLL of retrained layouts is relative to, by the plan's ``branch``."""
    config = BranchConfig.model_validate(branch)
    warmup = f"{config.warmup_steps} steps of" if config.warmup_steps else "no"
    return (
        "ΔNLL counts from the control: full attention retrained like the layouts, from a learning rate of "
        f"{config.learning_rate:g} with {warmup} warm-up. "
    )


_NOTED = {
    "chosen_on": "tokens chosen on",
    "judged_on": "tokens evaluated on",
    "judged_documents": "documents evaluated on",
}
_READING = (
    "## Where the heads that matter rank\n\n"
    "Each dot is a head. Shown are the heads that reduce NLL most when they alone are made global (add-one-head "
    "ablation), as many as the budget; a dot's area is that reduction, and lines connect the first five. "
    '"No price" and "priced, trained" are the same branch without and with a price. Each table is read at the '
    "threshold that keeps the budget's share of the keys. Heads left of the line are chosen."
)
_DELTA = (
    "± one standard error, paired by document; for random layouts, the standard error of the mean over draws. "
    "Layouts of whole layers may have another number of heads, shown in parentheses."
)
_VERDICT = (
    'Negative values are better. "yes": better by more than two standard errors, paired by document; "worse": '
    "worse by more than two."
)
_CORRELATION = (
    "Over the distinct layouts of a reference and budget, with a 95 % interval from resampled layouts. The "
    "correlation of a coverage that ranks layouts well is near -1."
)
_COST = (
    "Millions of tokens in forward passes (seconds on one core). A training step counts as three times its "
    "tokens, or twice on a frozen model. Scores of layouts count the layers that were run; those of a search "
    "count in full, including the signals that it starts from. Probing counts once. The seconds of unpriced-long "
    "are those of its probe."
)
_CURVES = (
    "ΔNLL in % from full attention at the same length: of the layout that the signal chose at this setting "
    "(here), of the layout that it chose at its usual setting with the same seed (base), and of B, one layer in "
    "four."
)


def _grid(rows: pd.DataFrame, index: str, across: list[str], cell: Callable[[pd.Series], str]) -> str:
    """Format a table with a line per value of ``index`` and a column per value of ``across``, in ``_ordered`` order."""
    heads = list(dict.fromkeys(tuple(row) for row in rows[across].to_numpy()))
    cells = {(row[index], *(row[key] for key in across)): cell(row) for _, row in rows.iterrows()}
    lines = [[name, *(cells.get((name, *head), "") for head in heads)] for name in dict.fromkeys(_ordered(rows, index))]
    return markdown([index.replace("_", " "), *(", ".join(head) for head in heads)], lines)


def _ordered(rows: pd.DataFrame, index: str) -> list[str]:
    """Return the values of ``index``, sorted by their mean ΔNLL if rows have one."""
    names: list[str] = rows[index].tolist()
    if "delta_nll_percent" in rows:
        names = rows.groupby(index)["delta_nll_percent"].mean().sort_values().index.tolist()
    return names


def _change(row: pd.Series) -> str:
    """Format a ΔNLL, with the number of heads if it differs from the budget."""
    head_count = f" ({row['heads']} heads)" if row["heads"] != row["asked"] else ""
    return f"{row['delta_nll_percent']:+.3f} ± {row['standard_error']:.3f}{head_count}"


def _difference(row: pd.Series) -> str:
    """Format a difference with its verdict."""
    verdict = "worse" if row["worse_by_two_errors"] == "yes" else row["better_by_two_errors"]
    return f"{row['difference_percent']:+.3f} ± {row['standard_error']:.3f} {verdict}"


def _rho(row: pd.Series) -> str:
    """Format a correlation with its interval."""
    return f"{row['rho']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"


def _cost(row: pd.Series) -> str:
    """Format a cost."""
    return f"{row[COST] / 1e6:.2f} ({row[SECONDS]:.0f} s)"


def _ranks(rows: pd.DataFrame) -> str:
    """Format the table of mean ranks."""
    lines = [
        [row["fidelity"], row["chooser"], f"{row['mean_rank']:.1f}", f"{row['relative_rank']:.2f}", row["groups"]]
        for _, row in rows.iterrows()
    ]
    note = "Over references and budgets; relative: 0 is the best of all, 1 the worst."
    return f"{note}\n\n{markdown(['fidelity', 'chooser', 'mean rank', 'relative', 'of'], lines)}"


def _curves(rows: pd.DataFrame) -> str:
    """Format the table of curves."""
    names = ["steps", "step_tokens", "block_size", "window", "seed", "heads", "shared_with_base"]
    lines = [
        [row["signal"], *(int(row[name]) for name in names), *(_of(row, which) for which in ("own", "base", "rule"))]
        for _, row in rows.iterrows()
    ]
    return markdown(["signal", *(name.replace("_", " ") for name in names), "here", "base", "B"], lines)


def _of(row: pd.Series, which: str) -> str:
    """Format the ΔNLL of one of a setting's layouts."""
    return f"{row[f'{which}_delta_nll_percent']:+.3f} ± {row[f'{which}_standard_error']:.3f}"


def _unfinished(lines: Sequence[str]) -> str:
    """Write the section of unfinished work."""
    return "## Not finished\n\n" + ("\n".join(f"- {line}" for line in lines) or "Nothing: the whole plan is finished.")


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a Markdown table; "Nothing yet." without rows."""
    if not rows:
        return "Nothing yet."
    lines = [list(map(str, line)) for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
