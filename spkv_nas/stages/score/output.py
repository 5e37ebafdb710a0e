"""Print zero-shot scores of layouts for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path, say
from spkv_nas.proposal.answer import uneven_budgets
from spkv_nas.stages.printing import about_errors, about_selection, change, show_alarm
from spkv_nas.stages.subject import NLLTable


def show(result: NLLTable) -> None:
    """Print the NLL of every layout."""
    show_alarm(result.alarm)
    title = f"{escape(result.name)}: without training"
    grid = Table("layout", "global heads", "coverage %", "NLL", "ΔNLL %", title=title)
    rows, same = result.rows[result.rows["hash"] != ""], result.rows.groupby("hash", sort=False)["strategy"]
    for row in result.rows.drop_duplicates("hash").itertuples():
        coverage = f"{row.coverage_percent:.2f}" if row.coverage_percent == row.coverage_percent else "-"
        grid.add_row(
            escape(" = ".join(same.get_group(row.hash))),
            str(row.num_global),
            coverage,
            f"{row.nll:.4f}",
            change(row.delta_nll_percent, row.delta_nll_standard_error),
        )
    out.print(grid)
    if (uneven := uneven_budgets(rows, int(rows["num_global"].mode().max()))) is not None:
        say(uneven)
    about_errors(result.num_documents, result.effective_documents)
    about_selection(result.num_selection, result.selected_by)
    print_path("scores", result.folder / "zero-shot.csv")
