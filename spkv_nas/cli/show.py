"""Print results for people: tables and sentences of the workflow, of training, of evaluation and of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spkv_nas.base.console import caution, out, say, say_where
from spkv_nas.stages.printing import about_errors, change

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.stages.baselines import BaselinesResult
    from spkv_nas.stages.evaluate import ScoreResult
    from spkv_nas.stages.layout import ComparedLayouts, ShownLayout
    from spkv_nas.stages.layout_options import DiffOptions
_STYLES = {"G": "bold green", "L": "dim", ".": "dim", "+": "bold green", "-": "bold red"}


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


def grids(shown: list[ShownLayout]) -> None:
    """Print layouts as grids, with the number of global heads of every layer."""
    for entry in shown:
        _layout(entry)


def _layout(entry: ShownLayout) -> None:
    """Print a layout's summary and its grid."""
    coverage = "" if entry.coverage is None else f", coverage {100 * entry.coverage:.2f} %"
    out.print(Text(f"{entry.file}: {_describe(entry.layout)}{coverage}"), soft_wrap=True)
    _grid(entry.layout.heads, [str(row.count("G")) for row in entry.layout.heads])


def difference(options: DiffOptions, compared: ComparedLayouts) -> None:
    """Print how two layouts differ."""
    first, second, delta = compared.one, compared.other, compared.difference
    if compared.same:
        out.print(f"the same layout: {_describe(first)}", soft_wrap=True)
        return
    out.print(Text(f"- {options.a}: {_describe(first)}\n+ {options.b}: {_describe(second)}"), soft_wrap=True)
    out.print(f"{delta.num_heads} heads differ, Jaccard index of the global heads {delta.jaccard:.3f}")
    if delta.num_heads:
        out.print("G global in both, . local in both, - global in the first only, + in the second only")
        _grid(delta.marks, ["" for _ in delta.marks])


def _describe(layout: Layout) -> str:
    """Return a layout's shape, share of global heads, window and hash in one line."""
    share = f"{layout.num_global} of {layout.num_heads} global ({100 * layout.num_global / layout.num_heads:.1f} %)"
    size = f"{layout.num_layers} layers x {layout.num_kv_heads} KV heads"
    return f"{size}, {share}, window {layout.window}, hash {layout.hash}"


def _grid(rows: Sequence[str], notes: Sequence[str]) -> None:
    """Print one line per layer: its index, its marks, a note."""
    for layer, (row, note) in enumerate(zip(rows, notes, strict=True)):
        marks = [(mark, _STYLES[mark]) for mark in row]
        out.print(Text.assemble(f"{layer:>4}  ", *marks, f"  {note}".rstrip()), soft_wrap=True)
