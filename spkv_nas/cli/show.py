"""Results for people: tables and sentences of the path, of training and evaluation, and of layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from spkv_nas.cli.console import caution, err, out, say, say_where

if TYPE_CHECKING:
    from pathlib import Path

    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.model.generation import Generation
    from spkv_nas.stages.baselines import BaselinesResult
    from spkv_nas.stages.evaluate import ScoreResult
    from spkv_nas.stages.layout import ComparedLayouts, ShownLayout
    from spkv_nas.stages.layout_options import DiffOptions
    from spkv_nas.stages.longppl import LongPPLResult
    from spkv_nas.stages.propose import AgreementResult, BudgetsResult, ProposalResult
    from spkv_nas.stages.ruler import RulerResult
    from spkv_nas.stages.tasks import TasksResult
    from spkv_nas.stages.train import AblationResult, PalindromeResult, Trained
    from spkv_nas.training.hybrids import Comparison

_WIDEST = 100  # standard errors to either side, beyond which an interval says nothing
_CURVE_ROWS = 16  # of a budget curve, printed
_STYLES = {"G": "bold green", "L": "dim", ".": "dim", "+": "bold green", "-": "bold red"}


def change(percent: float, error: float | None = None) -> str:
    """A change of NLL such as ``+0.894 ± 0.082``; a dash for NaN, which the error of a single document is."""
    if math.isnan(percent):
        return "-"
    return f"{percent:+.3f}" if error is None else f"{percent:+.3f} ± {'-' if math.isnan(error) else f'{error:.3f}'}"


def about_errors(num_documents: int, effective: float) -> None:
    """Say what ± is, and how wide a 95 % interval is where documents are few."""
    from spkv_nas.base.statistics import FEW_DOCUMENTS, critical_errors

    number = f"{num_documents} held-out documents (effective number {effective:.1f})"
    out.print(f"±: one standard error, paired by {number}")
    if effective < FEW_DOCUMENTS:
        width = critical_errors(effective)
        so_wide = f"is ± {width:.1f} standard errors" if width < _WIDEST else "cannot be given"
        caution(f"warning: of so few documents, a 95 % interval {so_wide} (Student's t): measure on more text")


def probe(table: HeadScores) -> None:
    """A probe's mean and its highest head; what it cautions against."""
    from spkv_nas.artifacts.domains import about_small_domains

    densest = max((table.density[i, j], i, j) for i in range(table.num_layers) for j in range(table.num_kv_heads))
    measure = f"tau {table.tau:g}: density" if table.is_density else table.signal
    exact = ".3f" if table.is_density else ".3g"
    out.print(
        f"[bold]{escape(table.name)}[/bold]: {table.num_layers} layers x {table.num_kv_heads} KV heads, "
        f"{measure} mean {table.mean:{exact}}, std {table.std:{exact}}; "
        f"highest is layer {densest[1]}, head {densest[2]} ({densest[0]:{'.2f' if table.is_density else exact}})"
    )
    if "passes" in table.metadata:
        reused = f"; scores reused: {number}" if (number := table.metadata.get("reused_scores")) else ""
        say(f"it took {table.metadata['passes']:,g} forward passes over {table.metadata['tokens']:,} tokens{reused}")
    if (small := about_small_domains(table)) is not None:
        say(small)
    for line in table.diagnosis():
        caution(line)


def proposal(result: ProposalResult) -> None:
    """Layouts by coverage, and what else was asked."""
    layouts(result)
    for sentence in result.sentences:
        say(sentence)
    if result.advice is not None:
        caution(result.advice)


def layouts(result: ProposalResult) -> None:
    """Layouts by coverage."""
    from spkv_nas.proposal.answer import random_spread

    answer = result.answer
    table, spread = answer.table, random_spread(answer.rows)
    measure = f"density coverage at tau {table.tau:g}" if table.is_density else f"coverage of {table.signal}"
    shown = Table("strategy", "global heads", "density %", "coverage %", "note", title=measure)
    for row in answer.rows.itertuples():
        shown.add_row(
            row.strategy, str(row.num_global), f"{row.density_percent:.1f}", f"{100 * row.coverage:.2f}", row.note
        )
    out.print(shown)
    if spread is not None and spread.standard_deviation > 0:
        out.print(
            f"random layouts: coverage {100 * spread.mean:.2f} % on average, "
            f"standard deviation {100 * spread.standard_deviation:.2f}"
        )
    out.print(f"layouts: {escape(str(result.folder))}", soft_wrap=True)


def budgets(result: BudgetsResult) -> None:
    """A budget curve, thinned, with its knee."""
    from spkv_nas.base.units import format_bytes
    from spkv_nas.proposal.stability import LEVEL

    table, rows, knee = result.curve.table, result.curve.rows, result.curve.knee
    is_known, has_memory = rows["coverage_low"].notna().all(), rows["kv_bytes"].notna().all()
    columns = ["budget", *(["heads"] if (rows["num_global"] != rows["budget"]).any() else []), "coverage %"]
    columns += [*(["from", "to"] if is_known else []), "worst domain %", *(["memory"] if has_memory else [])]
    interval = f"; from, to: {100 * LEVEL:.0f} % interval" if is_known else ""
    shown = Table(*columns, title=f"{escape(table.name)} at tau {table.tau:g}{interval}")
    step = -(-len(rows) // _CURVE_ROWS)
    for row in rows.itertuples():
        if row.Index % step and row.budget != knee.budget and row.Index != len(rows) - 1:
            continue
        cells = {
            "budget": f"{row.budget}{' knee' if row.budget == knee.budget else ''}",
            "heads": str(row.num_global),
            "coverage %": f"{100 * row.coverage:.2f}",
            "from": f"{100 * row.coverage_low:.2f}",
            "to": f"{100 * row.coverage_high:.2f}",
            "worst domain %": f"{100 * row.worst_domain:.2f}",
            "memory": format_bytes(int(row.kv_bytes)) if has_memory else "",
        }
        shown.add_row(*(cells[column] for column in columns))
    out.print(shown)
    out.print(f"knee: {knee.budget} global heads: {knee.meaning}")
    if result.caution is not None:
        say(result.caution)
    say_where("curve", result.figure or result.folder / "budgets.csv")
    say_where("layouts", result.folder / "budgets")


def agreement(result: AgreementResult) -> None:
    """How far probes agree, pair by pair."""
    from spkv_nas.proposal.agreement import short_labels

    rows = result.rows
    first, labels = rows.iloc[0], short_labels(rows)
    shown = Table(
        Column(overflow="fold"), Column(overflow="fold"), "Jaccard", "Spearman", "transfer %", "mean |Δ|",
        title=f"{first['budget']} densest heads (Jaccard by chance {first['chance']:.2f})",
    )  # fmt: skip
    for row in rows.itertuples():
        shown.add_row(
            escape(labels[row.first]), escape(labels[row.second]), f"{row.jaccard:.2f}", f"{row.spearman:.3f}",
            f"{100 * row.transfer:.1f}", f"{row.mean_difference:.3f}",
        )  # fmt: skip
    out.print(shown)
    out.print("transfer: coverage of the heads chosen on one, of the best possible on the other; the worse direction")
    say_where("agreement", result.figure or result.folder / "agreement.csv")


def comparison(result: Comparison) -> None:
    """Retrained layouts, how well cheaper measures order them, and where their checkpoints are."""
    from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION
    from spkv_nas.evaluation.ranking import format_rank_correlation

    baselines = {DENSE: "dense, as it is", FULL_ATTENTION: "control: full attention"}
    extended = "extended_nll" in result.rows
    shown = Table(
        "", "density\n%", "coverage\n%", "zero-shot\nΔNLL %", "\nNLL", "\nΔNLL %", "against the\ncontrol %",
        *(["longer\nblocks NLL", "against the\ncontrol %"] if extended else []),
        title="retrained from one dense checkpoint; ΔNLL counts from that checkpoint as it is",
    )  # fmt: skip
    for row in result.rows.itertuples():
        longer = [row.extended_nll, row.extended_delta_percent, row.extended_delta_standard_error] if extended else []
        shown.add_row(
            baselines.get(row.strategy, escape(row.strategy)), f"{row.density_percent:.1f}",
            f"{row.coverage_percent:.2f}", change(row.zero_shot_delta_percent), f"{row.nll:.4f}",
            change(row.delta_nll_percent, row.delta_nll_standard_error),
            change(row.delta_control_percent, row.delta_control_standard_error),
            *(["-" if math.isnan(longer[0]) else f"{longer[0]:.4f}", change(*longer[1:])] if extended else []),
        )  # fmt: skip
    out.print(shown)
    for row in result.rows[result.rows["note"] != ""].itertuples():
        say(f"{row.strategy}: {row.note}")
    about_errors(result.heldout.num_documents, result.heldout.effective_documents)
    for measure, found in result.correlations.items():
        if found is not None:
            perfect = "-1" if measure == "coverage" else "+1"
            out.print(f"rank correlation of {measure} and ΔNLL: {format_rank_correlation(found)}; perfect: {perfect}")
    out.print("checkpoints, for export, evaluate and generate:")
    for model in result.models:
        out.print(f"  {escape(model.strategy)}, seed {model.seed}: {escape(str(model.checkpoint))}", soft_wrap=True)


def scores(result: ScoreResult) -> None:
    """Zero-shot scores."""
    title = f"{escape(result.name)}: without training"
    shown = Table("layout", "global heads", "coverage %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        covered = f"{row.coverage_percent:.2f}" if row.coverage_percent == row.coverage_percent else "-"
        shown.add_row(
            escape(row.strategy), str(row.num_global), covered, f"{row.nll:.4f}",
            change(row.delta_nll_percent, row.delta_nll_standard_error),
        )  # fmt: skip
    out.print(shown)
    about_errors(result.num_documents, result.effective_documents)
    say_where("scores", result.folder / "zero-shot.csv")


def baselines(result: BaselinesResult) -> None:
    """Pruning after the fact, and SP-KV beside it."""
    shown = Table(
        "method", "sinks", "density %", "NLL", "ΔNLL %", title=f"{escape(result.name)}: pruned after the fact"
    )
    for row in result.rows.itertuples():
        method = f"{row.method}, tau {row.tau:g}" if row.tau == row.tau else row.method
        moved = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.Index else "-"
        sinks = "-" if row.sinks != row.sinks else f"{row.sinks:g}"
        shown.add_row(method, sinks, f"{100 * row.density:.1f}", f"{row.nll:.4f}", moved)
    out.print(shown)
    about_errors(result.num_documents, result.effective_documents)
    say_where("figure", result.folder / "baselines.png")


def ruler(result: RulerResult) -> None:
    """RULER's scores by task and length, with the floor and, if there is one, the other checkpoint."""
    against = result.rows["against"].notna().any()
    columns = ["length", "task", "score", "floor", "density %", *(["against", "difference"] if against else [])]
    title = f"{escape(result.name)}: share of answers found; floor: every head local"
    shown = Table(*columns, title=title)
    for row in result.rows.itertuples():
        cells = [
            str(row.length),
            row.task,
            _share(row.score, row.standard_error),
            _share(row.floor),
            _percent(row.density),
        ]
        pair = [_share(row.against), change(row.difference, row.difference_standard_error)] if against else []
        shown.add_row(*cells, *pair, end_section=row.task.startswith("average"))
    out.print(shown)
    say_where("scores", result.folder / "ruler.csv")
    say_where("answers", result.samples)


def tasks(result: TasksResult) -> None:
    """Downstream tasks by metric, and the other checkpoint, if there is one."""
    against = result.rows["against"].notna().any()
    pair = ["against", "density %", "difference"] if against else []
    shown = Table("task", "metric", "shots", "value", "density %", *pair, title=escape(result.name))
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
            moved = change(row.difference, row.difference_standard_error)
            cells += [_share(row.against), _percent(row.against_density), moved]
        shown.add_row(*cells)
    out.print(shown)
    say_where("values", result.folder / "tasks.csv")
    say_where("samples", result.samples)


def longppl(result: LongPPLResult) -> None:
    """LongPPL by domain, and the other checkpoint, if there is one."""
    against = result.rows["against_ppl"].notna().any()
    pair = ["against", "density %", "difference %"] if against else []
    shown = Table("text", "key tokens", "LongPPL", "PPL", "density %", *pair, title=escape(result.name))
    for row in result.rows.itertuples():
        cells = [
            escape(row.domain), f"{row.num_keys:,} of {row.num_tokens:,}", _share(row.longppl, row.standard_error),
            f"{row.ppl:.3f}", _percent(row.density),
        ]  # fmt: skip
        if against:
            moved = change(row.difference_percent, row.difference_standard_error)
            cells += [_share(row.against), _percent(row.against_density), moved]
        shown.add_row(*cells)
    out.print(shown)
    for domain, reason in result.withheld.items():
        say(f"{domain}: {reason}")
    say_where("values", result.folder / "longppl.csv")
    say_where("key tokens and NLL by text", result.samples)


def _percent(share: float) -> str:
    """A share such as ``28.3``, in percent."""
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def _share(value: float, error: float | None = None) -> str:
    """Write a share, with its error if there is one (``share_text``); a dash for NaN."""
    from spkv_nas.base.statistics import share_text

    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if error is None else share_text(value, error)


def generation(result: Generation) -> None:
    """Speed and cache of a generation, on standard error."""
    share = result.cache_bytes / result.full_attention_bytes
    reason = " (pages and windows that so short a text does not fill)" if share > 1 else ""
    err.print(
        f"{result.num_new_tokens} tokens, {result.tokens_per_second:.1f} tokens/s, after a prompt of "
        f"{result.num_prompt_tokens} tokens in {result.prefill_seconds:.2f} s\n"
        f"cache {result.cache_bytes / 1e6:.2f} MB, full attention {result.full_attention_bytes / 1e6:.2f} MB: "
        f"{100 * share:.0f} %{reason}"
    )
    if result.density is not None:
        kept = "no key left the window" if math.isnan(result.density) else f"density {100 * result.density:.1f} %"
        err.print(f"{kept} at tau {result.tau:g}" if result.tau is not None else kept)


def trained(result: Trained) -> None:
    """Where the checkpoints of a recipe are."""
    say(f"dense checkpoint: {result.dense}\nSP-KV reference:  {result.reference}")


def report(page: Path) -> None:
    """Where the page is."""
    say_where("report", page)


def palindrome(result: PalindromeResult) -> None:
    """The palindrome comparison."""
    shown = Table("attention", "NLL", "hard NLL", "mean utility", "density %", "seconds", title="nats per output token")
    for row in result.rows.itertuples():
        gated = row.hard_nll == row.hard_nll  # not NaN
        figures = (f"{row.hard_nll:.4f}", f"{row.mean_utility:.3f}") if gated else ("-", "-")
        shown.add_row(row.variant, f"{row.nll:.4f}", *figures, f"{100 * row.density:.1f}", f"{row.seconds:.0f}")
    out.print(shown)
    say_where("figure", result.folder / "palindrome.png")


def ablations(result: AblationResult) -> None:
    """Variants of one recipe against the first."""
    title = f"{escape(result.name)}: Δ counts from the first row, trained like the others"
    shown = Table("", "density %", "Δ density %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        error = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.Index else "-"
        moved = f"{row.delta_density_percent:+.1f}" if row.Index else "-"
        shown.add_row(escape(row.name), f"{row.density_percent:.1f}", moved, f"{row.nll:.4f}", error)
    out.print(shown)
    say_where("table", result.folder / "ablations.csv")


def grids(shown: list[ShownLayout]) -> None:
    """Layouts' grids, with the number of global heads of every layer."""
    for one in shown:
        _layout(one)


def _layout(shown: ShownLayout) -> None:
    covered = "" if shown.coverage is None else f", coverage {100 * shown.coverage:.2f} %"
    out.print(Text(f"{shown.file}: {_describe(shown.layout)}{covered}"), soft_wrap=True)
    _grid(shown.layout.heads, [str(row.count("G")) for row in shown.layout.heads])


def difference(options: DiffOptions, compared: ComparedLayouts) -> None:
    """How two layouts differ."""
    one, other, differs = compared.one, compared.other, compared.difference
    if compared.same:
        out.print(f"the same layout: {_describe(one)}", soft_wrap=True)
        return
    out.print(Text(f"- {options.a}: {_describe(one)}\n+ {options.b}: {_describe(other)}"), soft_wrap=True)
    out.print(f"{differs.num_heads} heads differ, Jaccard index of the global heads {differs.jaccard:.3f}")
    if differs.num_heads:
        out.print("G global in both, . local in both, - global in the first only, + in the second only")
        _grid(differs.marks, ["" for _ in differs.marks])


def _describe(layout: Layout) -> str:
    share = f"{layout.num_global} of {layout.num_heads} global ({100 * layout.num_global / layout.num_heads:.1f} %)"
    size = f"{layout.num_layers} layers x {layout.num_kv_heads} KV heads"
    return f"{size}, {share}, window {layout.window}, hash {layout.hash}"


def _grid(rows: Sequence[str], notes: Sequence[str]) -> None:
    """One line per layer: its number, its marks, a note."""
    for layer, (row, note) in enumerate(zip(rows, notes, strict=True)):
        marks = [(mark, _STYLES[mark]) for mark in row]
        out.print(Text.assemble(f"{layer:>4}  ", *marks, f"  {note}".rstrip()), soft_wrap=True)
