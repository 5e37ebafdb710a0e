"""What the commands of ``cli`` print: tables and sentences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spkv_nas.base.distributed import process_index
from spkv_nas.cli.search import change

if TYPE_CHECKING:
    import pandas as pd

    from spkv_nas.artifacts.density import DensityTable
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.base.workspace import Workspace
    from spkv_nas.evaluation.sweep import Evaluation
    from spkv_nas.model.generation import Generation

out = Console(highlight=False, quiet=process_index() > 0)
err = Console(stderr=True, highlight=False, quiet=process_index() > 0)


def probe(table: DensityTable) -> None:
    """A probe's mean and its highest head; what it cautions against."""
    densest = max((table.density[i, j], i, j) for i in range(table.num_layers) for j in range(table.num_kv_heads))
    measure = f"tau {table.tau:g}: density" if table.signal == "density" else table.signal
    out.print(
        f"[bold]{escape(table.name)}[/bold]: {table.num_layers} layers x {table.num_kv_heads} KV heads, "
        f"{measure} mean {table.mean:.3f}, std {table.std:.3f}; highest is layer {densest[1]}, head {densest[2]} "
        f"({densest[0]:.2f})"
    )
    for line in table.diagnosis():
        err.print(f"[yellow]{escape(line)}[/yellow]")


def proposal(table: DensityTable, layouts: dict[str, Layout], rows: pd.DataFrame, place: Workspace) -> None:
    """Layouts by coverage."""
    from spkv_nas.proposal.answer import random_spread

    measure = f"density coverage at tau {table.tau:g}" if table.signal == "density" else f"coverage of {table.signal}"
    shown = Table("strategy", "global heads", "density %", "coverage %", "note", title=measure)
    for row in rows.itertuples():
        shown.add_row(
            row.strategy, str(row.num_global), f"{row.density_percent:.1f}", f"{100 * row.coverage:.2f}", row.note
        )
    out.print(shown)
    spread = random_spread(rows)
    if spread is not None and spread.standard_deviation > 0:
        out.print(
            f"random layouts: coverage {100 * spread.mean:.2f} % on average, "
            f"standard deviation {100 * spread.standard_deviation:.2f}"
        )
    out.print(f"layouts: {place.layout_dir(table.name)}")


def evaluation(name: str, evaluation: Evaluation, rows: pd.DataFrame | None) -> None:
    """Held-out NLL, or with ``rows`` a sweep of thresholds."""
    num_tokens = evaluation.nll.num_tokens
    text = f"{num_tokens.sum():,} tokens in {(num_tokens > 0).sum()} documents"
    if rows is None:
        gated = (
            f", density {100 * evaluation.density:.1f} % at tau {evaluation.tau:g}"
            if evaluation.density is not None
            else ""
        )
        out.print(f"[bold]{escape(name)}[/bold]: NLL {evaluation.nll.mean:.4f}{gated}; {text}")
        return
    shown = Table("tau", "density %", "NLL", "ΔNLL %", title=f"{escape(name)}: {text}")
    for row in rows.itertuples():
        change = f"{row.delta_nll_percent:+.3f} ± {row.delta_nll_standard_error:.3f}" if row.tau else "-"
        shown.add_row(f"{row.tau:.4g}" if row.tau else "open", f"{100 * row.density:.1f}", f"{row.nll:.4f}", change)
    out.print(shown)


def generation(result: Generation) -> None:
    """Speed and cache of a generation, on standard error."""
    share = result.cache_bytes / result.full_attention_bytes
    err.print(
        f"{result.num_new_tokens} tokens, {result.tokens_per_second:.1f} tokens/s, after a prompt of "
        f"{result.num_prompt_tokens} tokens in {result.prefill_seconds:.2f} s\n"
        f"cache {result.cache_bytes / 1e6:.2f} MB, full attention {result.full_attention_bytes / 1e6:.2f} MB: "
        f"{100 * share:.0f} %"
    )
    if result.density is not None:
        kept = "no key left the window" if math.isnan(result.density) else f"density {100 * result.density:.1f} %"
        err.print(f"{kept} at tau {result.tau:g}" if result.tau is not None else kept)


def palindrome(rows: pd.DataFrame) -> None:
    """The palindrome comparison."""
    shown = Table("attention", "NLL", "hard NLL", "mean utility", "density %", "seconds", title="nats per output token")
    for row in rows.itertuples():
        gated = row.hard_nll == row.hard_nll  # not NaN
        figures = (f"{row.hard_nll:.4f}", f"{row.mean_utility:.3f}") if gated else ("-", "-")
        shown.add_row(row.variant, f"{row.nll:.4f}", *figures, f"{100 * row.density:.1f}", f"{row.seconds:.0f}")
    out.print(shown)


def scaling(name: str, law: dict[str, Any]) -> None:
    """One fitted law and what it predicts."""
    title = f"{name}, {law['variant']}" if law["variant"] else name
    shown = Table("", "value", f"{law['confidence']:.0%} interval", title=escape(f"{title}: {law['law']}"))
    for parameter, (value, low, high) in law["parameters"].items():
        shown.add_row(parameter, f"{value:.4g}", f"{low:.4g} .. {high:.4g}")
    out.print(shown)
    out.print(
        f"R² {law['r_squared']:.5f} over {law['num_runs']} runs; a run's standard deviation {law['residual']:.4f}"
    )
    last = law["leave_last_out"]
    if last["predicted"] is not None:
        out.print(
            f"last run from the others: {escape(last['name'])} predicted {last['predicted']:.4f}, "
            f"is {last['nll']:.4f} ({last['error_percent']:+.2f} %)"
        )
    for run in law["runs"]:
        if run["held_out"]:
            out.print(
                f"held out: {escape(run['name'])} predicted {run['predicted']:.4f} ({run['low']:.4f} .. "
                f"{run['high']:.4f}), is {run['nll']:.4f} ({run['error_percent']:+.2f} %)"
            )


def comparison(rows: pd.DataFrame, correlations: dict[str, dict[str, Any] | None]) -> None:
    """Retrained layouts, and how well cheaper measures order them."""
    shown = Table(
        "strategy", "density\n%", "coverage\n%", "zero-shot\nΔNLL %", "\nNLL", "\nΔNLL %",
        title="retrained from one dense checkpoint",
    )  # fmt: skip
    for row in rows.itertuples():
        shown.add_row(
            row.strategy, f"{row.density_percent:.1f}", f"{row.coverage_percent:.2f}",
            change(row.zero_shot_delta_percent), f"{row.nll:.4f}",
            change(row.delta_nll_percent, row.delta_nll_standard_error),
        )  # fmt: skip
    out.print(shown)
    for measure, found in correlations.items():
        if found is not None:
            low, high = found["interval"]
            out.print(
                f"rank correlation of {measure} and ΔNLL over {found['layouts']} layouts: {found['rho']:+.2f} "
                f"(p = {found['p_value']:.2f}, 95 % interval {low:+.2f} to {high:+.2f}; "
                f"{'-1' if measure == 'coverage' else '+1'} would mean that it orders them perfectly)"
            )


def scores(name: str, rows: pd.DataFrame, folder: Path) -> None:
    """Zero-shot scores."""
    shown = Table("layout", "global heads", "coverage %", "NLL", "ΔNLL %", title=f"{escape(name)}: without training")
    for row in rows.itertuples():
        covered = f"{row.coverage_percent:.2f}" if row.coverage_percent == row.coverage_percent else "-"
        shown.add_row(
            escape(row.strategy), str(row.num_global), covered, f"{row.nll:.4f}",
            change(row.delta_nll_percent, row.delta_nll_standard_error),
        )  # fmt: skip
    out.print(shown)
    out.print(f"scores: {escape(str(folder / 'zero-shot.csv'))}")
