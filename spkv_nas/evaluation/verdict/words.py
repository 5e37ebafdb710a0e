"""Say in words what the rows of a verdict mean, for the terminal and for the page."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd


def conclusion(
    rows: pd.DataFrame, answer: str, nouns: Mapping[str, str], samples: Mapping[str, int]
) -> tuple[str, str]:
    """Return the answer about a candidate and its reason, such as ("passes", "its loss is below 1 % (nll)").

    ``rows`` has the columns of ``VERDICT``; ``nouns`` and ``samples`` say what a sample is, and how many there are.
    """
    if answer == "passes":
        return "passes", f"its loss is below {_margins(rows)}"
    if answer == "fails":
        return "fails", f"its loss is above {_margins(rows[rows['answer'] == 'fails'])}"
    # Say which criteria are open, and how many more samples would decide
    parts = []
    for row in rows[rows["answer"] == "open"].to_dict("records"):
        more = row["more_samples"]
        if not row["num_samples"]:
            about = "this text has none"
        elif not pd.isna(more):
            about = f"about {int(more):,} more would tell"
        elif row.get("fails_level") == 0 and row["loss"] > row["margin"]:
            about = (
                f"its loss of {row['loss']:+.3g} {row['unit']} is above the margin of {row['margin']:g} {row['unit']}, "
                "but the search tested only whether it passes"
            )
        elif row.get("passes_level") == 0 and row["loss"] < row["margin"]:
            about = (
                f"its loss of {row['loss']:+.3g} {row['unit']} is below the margin of {row['margin']:g} {row['unit']}, "
                "but the search tested only whether it fails"
            )
        else:
            about = "its loss is too near the margin to say how many more would tell"
        counted = f"{row['num_samples']} {nouns.get(row['criterion'], 'samples')}"
        if row["num_samples"] >= samples.get(row["criterion"], math.inf):
            counted += ", all that this text gives"
        parts.append(f"{row['criterion']} after {counted}; {about}")
    return "is open", ", and ".join(parts) or "its samples are not measured yet"


def basis(
    risk: float, shared: str, num_left_out: int | None, selected_by: Sequence[str], unrecorded: Sequence[str] = ()
) -> str:
    """Return what the error rate is, and what was left out for it to hold.

    ``shared`` says who shares the risk, if anybody. ``num_left_out`` counts the documents of the text, if one is read,
    that ``selected_by`` selected a layout on; ``unrecorded`` names layouts whose documents are not, or not all, known.
    """
    words = f"risk of a wrong pass, and of a wrong failure, {100 * risk:g} % each{shared}, checked after every sample"
    if num_left_out is None:
        return words
    # Say what was left out
    parts = [words]
    if selected_by:
        noun = "document" if num_left_out == 1 else "documents"
        nothing = "none of their documents is in this text" if unrecorded else "on other text"
        exclusion = f"{num_left_out} {noun} of this text excluded" if num_left_out else nothing
        parts.append(f"selected by {', and by '.join(selected_by)}: {exclusion}")
    # Name the layouts whose documents are not known
    if unrecorded or not selected_by:
        layouts = ", ".join(unrecorded) or "the candidates"
        parts.append(f"the documents used to select {layouts} are not known, so they may be in this text")
    return "; ".join(parts)


def shared_by(num_candidates: int) -> str:
    """Return ``shared`` of ``basis`` for candidates of one verdict."""
    return f" for all {num_candidates} candidates together (Holm)" if num_candidates > 1 else ""


def _margins(rows: pd.DataFrame) -> str:
    """List the margins of some rows."""
    margins = [f"{row.margin:g} {row.unit} ({row.criterion})" for row in rows.itertuples()]
    if len(margins) < 2:
        return margins[0] if margins else "a margin"
    return f"{', '.join(margins[:-1])} and {margins[-1]}"
