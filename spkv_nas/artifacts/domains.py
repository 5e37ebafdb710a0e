"""Find domains of a density table with too few tokens to compare heads by."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores

FEW_TOKENS = 1024  # of a domain: fewer are only a paragraph or two


def small_domains(table: HeadScores) -> dict[str, int]:
    """Return the tokens of domains with fewer than ``FEW_TOKENS``, by name; empty if all domains are that small."""
    tokens = table.rows.groupby("domain")["num_tokens"].max()
    if not (tokens >= FEW_TOKENS).any():
        return {}
    return {str(name): int(number) for name, number in tokens.items() if number < FEW_TOKENS}


def about_small_domains(table: HeadScores) -> str | None:
    """Return a warning that lists the domains of ``small_domains``; None if there are none."""
    small = small_domains(table)
    if not small:
        return None
    named = ", ".join(f"{name} ({number:,} tokens)" for name, number in small.items())
    return f"domains with fewer than {FEW_TOKENS:,} tokens, too few to compare heads by: {named}"
