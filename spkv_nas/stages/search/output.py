"""Print what ``search`` returns, and its JSON document."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path, say
from spkv_nas.base.statistics import effective_number
from spkv_nas.evaluation.ranking import format_rank_correlation
from spkv_nas.evaluation.searched import best_layouts, correlations
from spkv_nas.evaluation.trust import MIN_DOCUMENTS
from spkv_nas.stages.printing import about_errors, change, show_alarm
from spkv_nas.stages.search.stage import SearchResult


def show(result: SearchResult) -> None:
    """Print the best layouts, how well cheap measures rank them, and the layout to take."""
    show_alarm(result.alarm)
    rows, cost, number = result.rows, result.cost_name, result.num_selection_documents
    is_ranked = number >= MIN_DOCUMENTS
    # Table of the best layouts
    shown = best_layouts(rows) if is_ranked else rows.drop_duplicates("hash").head(12)
    columns = ["layout", "global heads", "coverage %", *([cost] if cost else [])]
    title = f"{'best' if is_ranked else 'first'} layouts, scored on {number} documents"
    grid = Table(*columns, "zero-shot ΔNLL %", "short", "full ΔNLL %", title=title)
    for row in shown.to_dict("records"):
        grid.add_row(
            escape(row["name"]),
            str(row["num_global"]),
            f"{row['coverage_percent']:.1f}",
            *([f"{row['cost']:.4g}"] if cost else []),
            *(
                change(row[f"{fidelity}_delta_percent"], row[f"{fidelity}_standard_error"])
                for fidelity in ("zero_shot", "short", "full")
            ),
        )
    out.print(grid)
    # What the numbers mean
    say(
        "zero-shot ΔNLL is relative to the unchanged dense model, short and full to retrained full attention; "
        f"zero-shot and short on the {number} documents that select, full on others; ±: one standard error, paired by "
        "document"
    )
    if rows["full_delta_percent"].notna().any():
        about_errors(int((result.evaluation_tokens > 0).sum()), effective_number(result.evaluation_tokens))
    for pair, correlation in correlations(rows).items() if is_ranked else ():
        if correlation is not None:
            out.print(f"rank correlation of {pair}: {format_rank_correlation(correlation)}")
    print_path("search", result.folder / "search.csv")
    # What to take
    if result.recommended is not None and result.file is not None:
        say(result.recommended.reason)
        print_path(f"take {result.recommended.layout.strategy}", result.file)


def document(result: SearchResult) -> dict[str, Any]:
    """Return all layouts of a search, the rank correlations of cheap measures, and the layout to take."""
    recommended = result.recommended
    return {
        "layouts": result.rows,
        "alarm": result.alarm,
        "num_selection_documents": result.num_selection_documents,
        "num_documents": int((result.evaluation_tokens > 0).sum()),
        "effective_documents": effective_number(result.evaluation_tokens),
        "cost": result.cost_name,
        "rank_correlation": correlations(result.rows),
        "recommended": None if recommended is None else {"layout": str(result.file), "reason": recommended.reason},
        "folder": result.folder,
    }
