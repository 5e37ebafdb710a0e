"""Format changes of NLL, standard errors and table cells, as every command prints them."""

import math
from collections.abc import Mapping, Sequence

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.console import Table, caution, escape, out
from spkv_nas.base.statistics import FEW_DOCUMENTS, critical_errors

_WIDEST = 100  # standard errors; a wider confidence interval is not printed


def change(percent: float, error: float | None = None) -> str:
    """Format a change of NLL, such as ``+0.894 ± 0.082``; NaN, such as the error of a single document, is a dash."""
    if math.isnan(percent):
        return "-"
    if error is None:
        return f"{percent:+.3f}"
    if math.isnan(error):
        return f"{percent:+.3f} ± -"
    return f"{percent:+.3f} ± {error:.3f}"


def print_rows(rows: Sequence[Mapping[str, str]], title: str) -> None:
    """Print rows as a table, with the columns of the first that have a value: neither nothing nor a dash."""
    columns = [name for name in rows[0] if not {row[name] for row in rows} <= {"", "-"}]
    grid = Table(*columns, title=title)
    for row in rows:
        grid.add_row(*(row[name] for name in columns))
    out.print(grid)


def show_alarm(sentence: object) -> None:
    """Print that measurements make no sense (``evaluation.alarms``); nothing for None."""
    if sentence is not None:
        caution(f"warning: {sentence}")


def about_errors(num_documents: int, effective: float) -> None:
    """Print what ± means and, for few documents, a warning with the width of a 95 % confidence interval."""
    number = f"{num_documents} documents (effective number {effective:.1f})"
    out.print(f"±: one standard error, paired by {number}")
    if effective < FEW_DOCUMENTS:
        width = critical_errors(effective)
        interval = f"is ± {width:.1f} standard errors" if width < _WIDEST else "cannot be computed"
        caution(
            f"warning: with so few documents, a 95 % interval {interval} (Student's t): "
            "measure on more text"
        )


def about_selection(number: int, selected_by: Sequence[str]) -> None:
    """Print how many measured documents were used to select a layout, and by what; nothing for none."""
    if number:
        out.print(
            f"{number} of these documents were used to select a "
            f"layout ({escape(', '.join(selected_by))}), which may "
            "favour it; verdict leaves such documents out"
        )


def identification(table: HeadScores) -> dict[str, object]:
    """Return what identifies a table of head scores."""
    return {
        "name": table.name,
        "signal": table.signal,
        "tau": table.tau if table.is_density else None,
        "num_layers": table.num_layers,
        "num_kv_heads": table.num_kv_heads,
    }
