"""Print what ``evaluate`` measured: held-out NLL, a threshold sweep, RULER, downstream tasks, and LongPPL."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, say, say_where
from spkv_nas.stages.printing import about_errors, change

if TYPE_CHECKING:
    import pandas as pd

    from spkv_nas.stages.evaluate import EvaluationResult
    from spkv_nas.stages.longppl import LongPPLResult
    from spkv_nas.stages.ruler import RulerResult
    from spkv_nas.stages.tasks import TasksResult


def evaluation(result: EvaluationResult) -> None:
    """Print held-out NLL, the difference to another checkpoint, or a threshold sweep."""
    evaluation, nll = result.evaluation, result.evaluation.nll
    text = f"{nll.num_tokens.sum():,} tokens in {nll.num_documents} documents"
    # One checkpoint, or a pair
    if result.sweep is None:
        density_note = (
            f", density {100 * evaluation.density:.1f} % at tau {evaluation.tau:g}"
            if evaluation.density is not None
            else ""
        )
        text += f" (effective number {nll.effective_documents:.1f})"
        out.print(f"[bold]{escape(result.name)}[/bold]: NLL {nll.mean:.4f}{density_note}; {text}")
        if result.pair is not None:
            difference = change(result.pair.change.percent, result.pair.change.standard_error)
            out.print(
                f"against {escape(result.pair.against)}: NLL {result.pair.evaluation.nll.mean:.4f}; "
                f"difference {difference} %"
            )
            about_errors(nll.num_documents, nll.effective_documents)
            say_where("table", result.folder / "evaluation.csv")
        return
    # Sweep of thresholds
    grid = Table("tau", "density %", "NLL", "ΔNLL %", title=f"{escape(result.name)}: {text}")
    for row in result.sweep.itertuples():
        difference = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.tau else "-"
        grid.add_row(f"{row.tau:.4g}" if row.tau else "open", f"{100 * row.density:.1f}", f"{row.nll:.4f}", difference)
    out.print(grid)
    about_errors(nll.num_documents, nll.effective_documents)
    say_where("sweep", result.folder / "tau-sweep.png")


def ruler(result: RulerResult) -> None:
    """Print RULER scores by length and task, with the floor and, if there is one, the other checkpoint."""
    against = result.rows["against"].notna().any()
    columns = ["length", "task", "score", "floor", "density %", *(["against", "difference"] if against else [])]
    title = f"{escape(result.name)}: share of answers found; floor: every head local"
    grid = Table(*columns, title=title)
    for row in result.rows.itertuples():
        cells = [
            str(row.length),
            row.task,
            _share(row.score, row.standard_error),
            _share(row.floor),
            _percent(row.density),
        ]
        pair_cells = [_share(row.against), change(row.difference, row.difference_standard_error)] if against else []
        grid.add_row(*cells, *pair_cells, end_section=row.task.startswith("average"))
    out.print(grid)
    single_tasks = result.rows[~result.rows["task"].str.startswith("average")]
    _say_sample_count(single_tasks["num_samples"], "samples of a task")
    say_where("scores", result.folder / "ruler.csv")
    say_where("answers", result.samples)


def tasks(result: TasksResult) -> None:
    """Print downstream tasks by metric, with the other checkpoint if there is one."""
    against = result.rows["against"].notna().any()
    pair_columns = ["against", "density %", "difference"] if against else []
    grid = Table("task", "metric", "shots", "value", "density %", *pair_columns, title=escape(result.name))
    for row in result.rows.itertuples():
        shots = "-" if row.num_fewshot != row.num_fewshot else f"{row.num_fewshot:g}"
        cells = [
            escape(row.task),
            escape(row.metric),
            shots,
            _share(row.value, row.standard_error),
            _percent(row.density),
        ]
        if against:
            difference = change(row.difference, row.difference_standard_error)
            cells += [_share(row.against), _percent(row.against_density), difference]
        grid.add_row(*cells)
    out.print(grid)
    _say_sample_count(result.rows["num_samples"], "samples of a task")
    say_where("values", result.folder / "tasks.csv")
    say_where("samples", result.samples)


def longppl(result: LongPPLResult) -> None:
    """Print LongPPL by domain, with the other checkpoint if there is one."""
    against = result.rows["against_ppl"].notna().any()
    pair_columns = ["against", "density %", "difference %"] if against else []
    grid = Table("text", "key tokens", "LongPPL", "PPL", "density %", *pair_columns, title=escape(result.name))
    for row in result.rows.itertuples():
        cells = [
            escape(row.domain),
            f"{row.num_keys:,} of {row.num_tokens:,}",
            _share(row.longppl, row.standard_error),
            f"{row.ppl:.3f}",
            _percent(row.density),
        ]
        if against:
            difference = change(row.difference_percent, row.difference_standard_error)
            cells += [_share(row.against), _percent(row.against_density), difference]
        grid.add_row(*cells)
    out.print(grid)
    _say_sample_count(result.rows["num_documents"], "documents")
    for domain, reason in result.withheld.items():
        say(f"{domain}: {reason}")
    say_where("values", result.folder / "longppl.csv")
    say_where("key tokens and NLL by text", result.samples)


def _say_sample_count(counts: pd.Series[int], unit: str) -> None:
    """Print how many samples the standard errors of a table rest on."""
    fewest, most = int(counts.min()), int(counts.max())
    number = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    out.print(f"±: one standard error over {number} {unit}")


def _percent(share: float) -> str:
    """Format a share in percent, such as ``28.3``; a dash for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def _share(value: float, error: float | None = None) -> str:
    """Format a share with its error, if there is one (``share_text``); a dash for NaN."""
    from spkv_nas.base.statistics import share_text

    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if error is None else share_text(value, error)
