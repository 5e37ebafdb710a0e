"""Budgets: how many KV heads may be global, as a number, a share of all, or a range."""

from __future__ import annotations

from spkv_nas.base.errors import UserError

DEFAULT_BUDGET = 18  # global heads, the paper's


def parse_budget(budget: int | str, num_heads: int) -> int:
    """Number of global KV heads from ``18``, ``"18"`` or ``"25%"`` (rounded to the nearest head).

    Raises:
        UserError: not a number, or outside 1..``num_heads``.
    """
    text = str(budget).strip()
    try:
        number = round(float(text[:-1]) / 100 * num_heads) if text.endswith("%") else int(text)
    except (ValueError, OverflowError) as error:
        raise UserError(f"budget '{budget}' is not a number of KV heads; give for example 18 or 25%") from error
    if not 1 <= number <= num_heads:
        said, means = text[:40], str(number)[:40]
        raise UserError(f"budget {said} means {means} global KV heads; the model has {num_heads}, so 1 to {num_heads}")
    return number


def is_range(budget: int | str) -> bool:
    """Whether a budget is a range, such as ``"6..40"``."""
    return ".." in str(budget)


def parse_budgets(budget: str, num_heads: int) -> list[int]:
    """Numbers of global KV heads from ``"6..40"``, ``"10%..50%"`` or, every fourth, ``"6..40:4"``; the ends included.

    Raises:
        UserError: not such a range, an end outside 1..``num_heads``, or nothing in between.
    """
    ends, _, step = budget.partition(":")
    low, _, high = ends.partition("..")
    first, last = parse_budget(low, num_heads), parse_budget(high, num_heads)
    if first > last:
        raise UserError(f"budget {budget} runs backwards: it means {first} to {last} global KV heads")
    try:
        stride = int(step) if step else 1
    except ValueError:
        stride = 0
    if stride < 1:
        raise UserError(f"budget '{budget}': the step after the colon must be a whole number from 1")
    numbers = list(range(first, last + 1, stride))
    return numbers if numbers[-1] == last else [*numbers, last]
