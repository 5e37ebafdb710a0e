"""Read the margins of a verdict with the options of their criteria, and its risk."""

import math
import re

from spkv_nas.base.errors import UserError
from spkv_nas.evaluation.verdict.criterion import Criterion
from spkv_nas.evaluation.verdict.registry import CRITERIA

Margins = list[tuple[Criterion, float]]  # criteria with the largest loss allowed in each
_CRITERION, _OPTION = re.compile(r",(?=\s*[\w-]+=)"), re.compile(r":(?=[\w-]+=)")  # what stands before one


def parse_margins(text: str) -> Margins:
    """Return the criteria with their margins, in the order of "nll=1%,ruler=2:lengths=512,4k:tasks=vt".

    Raises ``UserError`` if a criterion is unknown or named twice, a margin is no positive number below 100, or an
    option is wrong.
    """
    margins: dict[str, tuple[Criterion, float]] = {}
    for part in _CRITERION.split(text):
        # Split the margin and the options from the name
        loss, *options = _OPTION.split(part.strip())
        name, _, amount = (word.strip() for word in loss.partition("="))
        criterion = CRITERIA[name]
        number = _number(amount.removesuffix("%"))
        if not 0.0 < number < 100.0:
            raise UserError(f"--margin {loss}: expected NAME=LOSS with a loss above 0 and below 100")
        if name in margins:
            raise UserError(f"--margin {text}: {name} has two margins")
        margins[name] = criterion.with_words(options), number
    return list(margins.values())


def parse_risk(text: str | float) -> float:
    """Return a risk as a share: 0.05 for "5%" and for 0.05; ``UserError`` unless it is above 0 and up to 50 %."""
    text = str(text)
    risk = _number(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    if not 0.0 < risk <= 0.5:
        raise UserError(f"--risk {text}: expected a probability above 0 and up to 50%, such as 5%")
    return risk


def criteria_help() -> str:
    """Return the criteria with what their loss is, for the help of ``--margin``."""
    return "; ".join(f"{criterion.name}: {criterion.help}" for criterion in CRITERIA)


def options_help() -> str:
    """Return the options of all criteria with their help, a paragraph for each criterion that has some."""
    helps = {criterion.name: criterion.options_help() for criterion in CRITERIA}
    return "\n\n".join(f"Options of {name}: {text}" for name, text in helps.items() if text)


def _number(text: str) -> float:
    """Return a number; NaN for other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan
