"""Say in words what the measurements of a verdict mean, for the terminal and for the page."""

from collections.abc import Sequence

from spkv_nas.artifacts.measurement import Measurement, loss_text


def conclusion(measured: Sequence[Measurement], answer: str) -> tuple[str, str]:
    """Return the answer about a candidate and its reason, such as ("passes", "its loss is below 1 % (nll)").

    ``measured`` has the candidate's measurement by each criterion that was tested.
    """
    if answer == "passes":
        return "passes", f"its loss is below {_limits(measured)}"
    if answer == "fails":
        return (
            "fails",
            f"its loss is above {_limits([each for each in measured if each.answer == 'fails'])}",
        )
    # Say which criteria are open, and why
    reasons = []
    for each in measured:
        if each.answer == "open":
            counted = each.samples
            if each.num_samples >= each.num_available:
                counted += ", all that this text gives"
            reasons.append(f"{each.criterion} after {counted}; {_reason(each)}")
    return "is open", ", and ".join(reasons) or "its samples are not measured yet"


def _reason(open_one: Measurement) -> str:
    """Return why a measurement did not decide: which tests were made, and how many more samples would tell."""
    if not open_one.num_samples:
        return "this text has none"
    if open_one.more_samples is not None:
        return f"about {open_one.more_samples:,} more would tell"
    # A search tests whether a budget passes, fails, or both
    loss = f"its loss of {loss_text(open_one.loss)} {open_one.unit}"
    margin = f"the margin of {open_one.margin:g} {open_one.unit}"
    if open_one.fails_level == 0.0 and open_one.loss > open_one.margin:
        return f"{loss} is above {margin}, but the search tested only whether it passes"
    if open_one.passes_level == 0.0 and open_one.loss < open_one.margin:
        return f"{loss} is below {margin}, but the search tested only whether it fails"
    return f"{loss} is too near {margin} to say how many more would tell"


def basis(
    risk: float,
    shared: str,
    num_left_out: int | None,
    selected_by: Sequence[str],
    unrecorded: Sequence[str] = (),
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
        parts.append(
            f"the documents used to select {layouts} are not known, so they may be in this text"
        )
    return "; ".join(parts)


def shared_by(num_candidates: int) -> str:
    """Return ``shared`` of ``basis`` for candidates of one verdict."""
    return f" for all {num_candidates} candidates together (Holm)" if num_candidates > 1 else ""


def _limits(measured: Sequence[Measurement]) -> str:
    """List the margins of some measurements."""
    limits = [each.limit for each in measured]
    if len(limits) < 2:
        return limits[0] if limits else "a margin"
    return f"{', '.join(limits[:-1])} and {limits[-1]}"
