"""Print results for people: tables and sentences of the workflow, of training, of evaluation and of layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import caution, out, say, say_where
from spkv_nas.stages.printing import about_errors, change

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.stages.baselines import BaselinesResult
    from spkv_nas.stages.evaluate import ScoreResult


def probe(table: HeadScores) -> None:
    """Print a probe's mean score, its highest head, its cost, and its warnings."""
    from spkv_nas.artifacts.domains import about_small_domains

    densest = max((table.density[i, j], i, j) for i in range(table.num_layers) for j in range(table.num_kv_heads))
    measure = f"tau {table.tau:g}: density" if table.is_density else table.signal
    digits = ".3f" if table.is_density else ".3g"
    out.print(
        f"[bold]{escape(table.name)}[/bold]: {table.num_layers} layers x {table.num_kv_heads} KV heads, "
        f"{measure} mean {table.mean:{digits}}, std {table.std:{digits}}; "
        f"highest is layer {densest[1]}, head {densest[2]} ({densest[0]:{'.2f' if table.is_density else digits}})"
    )
    if "passes" in table.metadata:
        reused = f"; scores reused: {number}" if (number := table.metadata.get("reused_scores")) else ""
        say(f"it took {table.metadata['passes']:,g} forward passes over {table.metadata['tokens']:,} tokens{reused}")
    if (domain_warning := about_small_domains(table)) is not None:
        say(domain_warning)
    for line in table.diagnosis():
        caution(line)


def scores(result: ScoreResult) -> None:
    """Print zero-shot scores of layouts."""
    title = f"{escape(result.name)}: without training"
    grid = Table("layout", "global heads", "coverage %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        coverage = f"{row.coverage_percent:.2f}" if row.coverage_percent == row.coverage_percent else "-"
        grid.add_row(
            escape(row.strategy),
            str(row.num_global),
            coverage,
            f"{row.nll:.4f}",
            change(row.delta_nll_percent, row.delta_nll_standard_error),
        )
    out.print(grid)
    about_errors(result.num_documents, result.effective_documents)
    say_where("scores", result.folder / "zero-shot.csv")


def baselines(result: BaselinesResult) -> None:
    """Print training-free KV-cache pruning at each density, with SP-KV beside it."""
    grid = Table("method", "sinks", "density %", "NLL", "ΔNLL %", title=f"{escape(result.name)}: pruned after the fact")
    for row in result.rows.itertuples():
        method = f"{row.method}, tau {row.tau:g}" if row.tau == row.tau else row.method
        difference = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.Index else "-"
        sinks = "-" if row.sinks != row.sinks else f"{row.sinks:g}"
        grid.add_row(method, sinks, f"{100 * row.density:.1f}", f"{row.nll:.4f}", difference)
    out.print(grid)
    about_errors(result.num_documents, result.effective_documents)
    say_where("figure", result.folder / "baselines.png")
