"""Say how far a model's next-token predictions are displaced from the dense model's; needs no torch.

These are the statistics that ``llama-perplexity --kl-divergence`` prints of a quantized model: the KL divergence of the
dense model's distribution from the other's, whether both find the same token most probable, and the change of the
probability of the token that follows. Two models may have equal NLLs and yet predict differently.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from spkv_nas.base.arrays import Array

# Bits of the dense model's last hidden states, as numpy has no bfloat16; one channel where logits depend on more
STATES = Array("states", "whole", "blocks positions channels", low=-math.inf)
# By token: divergence in nats, whether the top token is the same, and change of the probability of the right one
VALUES = Array("displacements", "number", "values blocks positions", low=-1.0)
_DIGITS = 3  # significant digits of a divergence
_MOST_DECIMALS = 6  # decimals of a divergence, at most
QUANTILE = 0.999  # share of the tokens whose divergence is below ``kl_quantile``
# Margins that a document's divergence counts at most in a verdict by ``kld``. With ten, 39 documents without divergence
# decide, and about 76 with half of the margin; a document beyond ten is rare
CLIP = 10.0


@dataclass(frozen=True)
class Displacement:
    """Statistics over the compared tokens; standard errors are by document, NaN for a single one."""

    num_compared: int  # tokens
    kl_mean: float  # KL(dense || model), nats per token
    kl_standard_error: float
    kl_median: float
    kl_quantile: float  # at 99.9 %
    same_top: float  # percent of the tokens whose most probable prediction is the same
    same_top_standard_error: float  # percentage points
    delta_p_mean: (
        float  # probability of the right token, less the dense model's, in percentage points
    )
    delta_p_rms: float  # root of its mean square, in percentage points

    @property
    def words(self) -> str:
        """Return the main numbers: "KL divergence 0.0123 mean, 0.410 at 99.9 %; same top token 96.8 %"."""
        divergence = f"{nats_text(self.kl_mean)} mean, {nats_text(self.kl_quantile)} at 99.9 %"
        return f"KL divergence {divergence}; same top token {self.same_top:.1f} %"

    @classmethod
    def of_row(cls, row: Mapping[Any, Any]) -> "Displacement | None":
        """Read the columns of a row; None if they are missing or empty, as in older tables and for other criteria."""
        values = {name: _number(row.get(name)) for name in COLUMNS}
        if math.isnan(values["kl_mean"]) or math.isnan(values["num_compared"]):
            return None
        number = int(values.pop("num_compared"))
        return cls(num_compared=number, **values)


def _number(value: Any) -> float:
    """Return the number of a cell; NaN for an empty one, which is None or pandas.NA in a column of whole numbers."""
    return float(value) if isinstance(value, Real) else math.nan


COLUMNS = tuple(field.name for field in fields(Displacement))


def nats_text(nats: float) -> str:
    """Format a divergence with three digits, down to a millionth; NaN is a dash."""
    if math.isnan(nats):
        return "-"
    if nats < 10.0**-_MOST_DECIMALS:
        return "0"
    decimals = min(max(_DIGITS - 1 - math.floor(math.log10(nats)), 0), _MOST_DECIMALS)
    return f"{nats:.{decimals}f}"
