"""Say which domains of a density table have too few tokens to be set beside the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores

FEW_TOKENS = 1024  # of a domain, below which its densities are those of a paragraph or two


def small_domains(table: HeadScores) -> dict[str, int]:
    """Tokens of the domains with fewer than ``FEW_TOKENS``, sorted by name; empty where no domain has more."""
    tokens = table.rows.groupby("domain")["num_tokens"].max()
    if not (tokens >= FEW_TOKENS).any():
        return {}
    return {str(name): int(number) for name, number in tokens.items() if number < FEW_TOKENS}


def about_small_domains(table: HeadScores) -> str | None:
    """The sentence on ``small_domains`` for people; None where there are none."""
    small = small_domains(table)
    if not small:
        return None
    named = ", ".join(f"{name} ({number:,} tokens)" for name, number in small.items())
    return f"domains with fewer than {FEW_TOKENS:,} tokens, too few to compare heads by: {named}"
