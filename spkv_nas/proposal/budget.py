"""Parse budgets: numbers of global KV heads as counts or shares of all heads, and memory budgets."""

import math
from fractions import Fraction

from spkv_nas.base.errors import UserError
from spkv_nas.base.units import format_bytes

# Value of --tau: the threshold whose mean density equals the budget's share of heads
MATCH_BUDGET = "match-budget"
DEFAULT_SHARE = Fraction(18, 63)  # share of global heads in the paper: 18 of 21 x 3
MEMORY = "memory"  # begins budgets in shares of full attention's KV cache
MEMORIES = (4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 50, 60, 75)  # in percent: those of a range
PAPER_BUDGET = f"{DEFAULT_SHARE.numerator} of {DEFAULT_SHARE.denominator}"


def parse_budget(budget: int | str | None, num_heads: int) -> int:
    """Parse a budget to a number of global KV heads, of ``num_heads`` that can be global.

    It is ``18``, ``"18"`` or ``"25%"``, rounded to the nearest head; None for the paper's share, 2 of 7 heads. Raises
    ``UserError``: not a number, or outside 1..``num_heads``.
    """
    if budget is None:
        return max(1, round(DEFAULT_SHARE * num_heads))
    text = str(budget).strip()
    try:
        number = round(float(text[:-1]) / 100 * num_heads) if text.endswith("%") else int(text)
    except (ValueError, OverflowError) as error:
        raise UserError(
            f"budget '{budget}' is not a number of KV heads; give for example 18 or 25%"
        ) from error
    if not 1 <= number <= num_heads:
        budget_text = text[:40]
        number_text = str(number)[:40]
        raise UserError(
            f"budget {budget_text} means {number_text} global KV heads, "
            f"but the model has {num_heads} KV heads that can be global\n"
            f"give 1 to {num_heads}, or a share such as 25%"
        )
    return number


def is_several(budget: int | str | None) -> bool:
    """Return true if a budget names several: a list such as ``"12,18,24"``, or a range such as ``"6..40"``."""
    return any(sign in str(budget) for sign in (",", ".."))


def parse_budgets(budget: str, num_heads: int) -> list[int]:
    """Parse several budgets to distinct numbers of global KV heads, of ``num_heads`` that can be global, ascending.

    They are a list such as ``"12,18,24"`` of budgets and ranges. Ranges include both ends: ``"6..40"``, ``"10%..50%"``,
    or with a step ``"6..40:4"``. Raises ``UserError``: the text is malformed, a number lies outside 1..``num_heads``,
    or a range is descending.
    """
    return sorted({number for part in budget.split(",") for number in _parse_part(part, num_heads)})


def _parse_part(text: str, num_heads: int) -> list[int]:
    """Parse one item of the list: a budget or a range."""
    if ".." not in text:
        return [parse_budget(text, num_heads)]
    # Parse the ends and the step of the range
    ends, _, step = text.partition(":")
    low, _, high = ends.partition("..")
    first = parse_budget(low, num_heads)
    last = parse_budget(high, num_heads)
    if first > last:
        raise UserError(
            f"budget range {text} is descending, from {first} to {last} global KV heads: "
            "give the smaller end first"
        )
    try:
        stride = int(step) if step else 1
    except ValueError:
        stride = 0
    if stride < 1:
        raise UserError(
            f"budget '{text}': the step after the colon must be a whole number of at least 1"
        )
    return [*range(first, last, stride), last]


def parse_memories(text: str, full_bytes: float = math.inf) -> list[float]:
    """Parse limits on the KV cache to distinct percentages of full attention's, ascending.

    They are ``"memory"`` for all of ``MEMORIES``, ``"memory=5%..50%"`` for these ends and what is between them, a list
    such as ``"memory=10%,15%,20%"``, or bytes such as ``"memory=6GB"``.

    Args:
        text: the limits.
        full_bytes: of full attention's KV cache, for limits in bytes; the default only checks them.

    Raises:
        UserError: the text is malformed, a share is not between 0 and 100 %, or full attention fits in the bytes.
    """
    name, _, shares = text.partition("=")
    if name != MEMORY:
        raise UserError(
            f"budget '{text}': give numbers of heads, or {MEMORY}, "
            f"{MEMORY}=5%..50% or {MEMORY}=10%,20%"
        )
    if not shares:
        return [float(percent) for percent in MEMORIES]
    parts = shares.replace("..", ",").split(",")
    ends = [round(100.0 * _share(part, full_bytes), 6) for part in parts]
    if ".." not in shares:
        return sorted(set(ends))
    if len(ends) != 2 or ends[0] > ends[1]:
        raise UserError(
            f"budget '{text}': give a range from the smaller share to the larger one, "
            "such as 5%..50%"
        )
    low, high = ends
    between = [float(percent) for percent in MEMORIES if low < percent < high]
    return sorted({low, high, *between})


def _share(text: str, full_bytes: float) -> float:
    """Parse a share such as ``20%``, or bytes such as ``6GB``, to a share of ``full_bytes``."""
    from spkv_nas.cost.cache_cost import parse_memory  # imports pandas, which --help does not need

    memory = parse_memory(text)
    if memory < 1.0:
        return memory
    if memory >= full_bytes:
        raise UserError(
            f"--memory {text[:40]} holds the whole KV cache of full attention, "
            f"{format_bytes(int(full_bytes))}: no head needs to be local; give less, "
            "a longer --context or a larger --batch"
        )
    # Two digits of a percentage, which are no more than the bytes
    return math.floor(1e4 * memory / full_bytes) / 1e4
