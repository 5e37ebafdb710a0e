"""Budgets: how many KV heads may be global, as a number or as a share of all."""

from __future__ import annotations

from spkv_nas.errors import UserError


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
        raise UserError(
            f"budget {budget} means {number} global KV heads; the model has {num_heads}, so 1 to {num_heads}"
        )
    return number
