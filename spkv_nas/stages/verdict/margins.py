"""Read the margins, the risk and the names of candidates from the command line."""

from __future__ import annotations

import math

from spkv_nas.base.errors import UserError
from spkv_nas.stages.verdict.criterion import Criterion
from spkv_nas.stages.verdict.registry import CRITERIA


def is_layout(candidate: str) -> bool:
    """Return whether a candidate is a layout file rather than a checkpoint."""
    return candidate.lower().endswith((".yaml", ".yml"))


def parse_margins(text: str) -> list[tuple[Criterion, float]]:
    """Return the criteria with their margins, in the order of "nll=1%,ruler=2".

    Raises:
        UserError: a criterion is unknown or named twice, or a margin is no positive number below 100.
    """
    margins: dict[str, float] = {}
    for part in text.split(","):
        name, _, amount = (word.strip() for word in part.partition("="))
        criterion = CRITERIA[name]
        number = _number(amount.removesuffix("%"))
        if not 0.0 < number < 100.0:
            raise UserError(f"--margin {part.strip()}: expected NAME=LOSS with a loss above 0 and below 100")
        if criterion.name in margins:
            raise UserError(f"--margin {text}: {name} has two margins")
        margins[name] = number
    return [(CRITERIA[name], number) for name, number in margins.items()]


def parse_risk(text: str) -> float:
    """Return a risk as a share: 0.05 for "5%" and for "0.05".

    Raises:
        UserError: it is no number above 0 and up to 50 %.
    """
    risk = _number(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    if not 0.0 < risk <= 0.5:
        raise UserError(f"--risk {text}: expected a probability above 0 and up to 50%, such as 5%")
    return risk


def _number(text: str) -> float:
    """Return a number; NaN for other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan
