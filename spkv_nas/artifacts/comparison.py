"""``comparison.csv``: one row per retrained variant of a dense checkpoint, and the names of the two references."""

from __future__ import annotations

FULL_ATTENTION = "full-attention"

SP_KV = "sp-kv"


COLUMNS = (
    "strategy",
    "density_percent",
    "coverage_percent",
    "nll",
    "delta_nll_percent",
    "delta_nll_standard_error",
    "num_global",
    "num_seeds",
    "steps",
    "zero_shot_nll",
    "zero_shot_delta_percent",
    "note",
)
