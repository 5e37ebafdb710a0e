"""Print what ``search`` returns, and its JSON document."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.artifacts.search_table import whole_scores
from spkv_nas.base.console import out, print_path, say
from spkv_nas.base.statistics import effective_number
from spkv_nas.evaluation.guidance import SamplerSummary, best_layouts, correlations, guidance
from spkv_nas.evaluation.ranking import format_rank_correlation
from spkv_nas.stages.printing import about_errors, change, show_alarm
from spkv_nas.stages.search.stage import SearchResult


def show(result: SearchResult) -> None:
    """Print the best layouts, what each sampler reached, and the rank correlations of cheap measures."""
    from spkv_nas.base.statistics import effective_number

    show_alarm(result.alarm)
    rows, cost = result.rows, result.cost_name
    # Table of the best layouts
    columns = ["layout", "global heads", "coverage %", *([cost] if cost else [])]
    grid = Table(*columns, "zero-shot ΔNLL %", "short", "full ΔNLL %", title="best layouts")
    for row in best_layouts(rows).to_dict("records"):
        grid.add_row(
            escape(row["name"]),
            str(row["num_global"]),
            f"{row['coverage_percent']:.1f}",
            *([f"{row['cost']:.4g}"] if cost else []),
            f"{row['zero_shot_delta_percent']:+.3f}",
            change(row["short_delta_percent"]),
            change(row["full_delta_percent"], row["full_standard_error"]),
        )
    out.print(grid)
    # What the numbers mean
    if rows["full_delta_percent"].notna().any():
        about_errors(int((result.evaluation_tokens > 0).sum()), effective_number(result.evaluation_tokens))
    say("zero-shot ΔNLL is relative to the unchanged dense model, short and full to retrained full attention")
    if stopped := len(rows) - len(whole_scores(rows)):
        say(f"{stopped} of {len(rows)} layouts were clearly behind after a part of the text: scoring stopped there")
    # What each sampler reached
    quality = "hypervolume" if cost else "lowest zero-shot ΔNLL, %"
    for sampler, summary in guidance(rows).items():
        for sentence in _sentences(sampler, summary, quality):
            say(sentence)
    # Rank correlations
    for pair, correlation in correlations(rows).items():
        if correlation is not None:
            out.print(f"rank correlation of {pair}: {format_rank_correlation(correlation)}")
    print_path("search", result.folder / "search.csv")


def _sentences(sampler: str, summary: SamplerSummary, quality: str) -> list[str]:
    """Return what a sampler reached by number of trials, and its best retrained layout, in sentences."""
    sentences = []
    if summary.after_trials:
        steps = ", ".join(f"{value:.3f} after {count}" for count, value in summary.after_trials.items())
        number, error = len(summary.by_seed), summary.standard_error
        spread = f" (± {error:.3f} over {number} seeds)" if error is not None else ""
        sentences.append(f"{sampler}: {quality}: {steps}{spread}")
    if (best := summary.retrained) is not None:
        sentences.append(
            f"{sampler}: ΔNLL of {best.layout}, the best after short retraining, is "
            f"{change(best.delta_nll_percent, best.standard_error)} % after full retraining"
        )
    return sentences


def document(result: SearchResult) -> dict[str, Any]:
    """Return all layouts of a search, what each sampler reached, and the rank correlations of cheap measures."""
    return {
        "layouts": result.rows,
        "alarm": result.alarm,
        "num_documents": int((result.evaluation_tokens > 0).sum()),
        "effective_documents": effective_number(result.evaluation_tokens),
        "cost": result.cost_name,
        "guidance": {sampler: summary.as_mapping() for sampler, summary in guidance(result.rows).items()},
        "rank_correlation": correlations(result.rows),
        "folder": result.folder,
    }
