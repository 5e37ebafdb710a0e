"""A number for trust: how well a table orders what matters, judged by what opening single heads saves.

Opening gains (``artifacts.gains``) are noisy, and know nothing of what heads do together: the heads of largest gain
lose more, once retrained, than those that head gates choose (``reports/study``). So they describe a table and recommend
nothing, and no optimum of the gains is quoted, which would be chosen and judged on the same tokens. Only heads whose
gain stands out of its noise are named, and none where documents are few. Errors take heads as independent; that heads
gain in the same documents makes the true ones up to 1.7 times as large (reports/LOG.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.gains import Gains
from spkv_nas.evaluation.ranking import spearman

_CLEAR = 2.0  # standard errors of a head's gain from which on it is one
FEWEST_DOCUMENTS = 8  # from which on single heads are named

Float = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Missed:
    """A head that is left out, and its gain in nats per token."""

    layer: int
    kv_head: int
    gain: float
    standard_error: float

    def __str__(self) -> str:
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.3f}"
        return f"layer {self.layer}, head {self.kv_head} ({self.gain:.3f}{error} nats)"


@dataclass(frozen=True)
class Trust:
    """How well a table orders what opening single heads saves.

    Attributes:
        rho: Spearman's rank correlation of the table with the gains; None where it is not defined.
        interval: its 95 % interval, over resamples of the heads.
        budget: number of heads that the table chooses.
        left_out: share in [0, 1] of all gains above 0 that the other heads have; NaN where no gain is known from noise.
        left_out_error: its standard error.
        left_out_nats: the same in nats per token.
        missed: the heads left out whose gains are known from noise, the largest first; none where documents are few.
        num_documents: on which the gains were measured; None where that is not known.
    """

    rho: float | None
    interval: tuple[float, float] | None
    budget: int
    left_out: float
    left_out_error: float
    left_out_nats: float
    missed: tuple[Missed, ...]
    num_documents: int | None = None

    @classmethod
    def of(cls, values: Float, chosen: Mask, gains: Gains, num_documents: int | None = None) -> Trust:
        """Judge a table by gains that it was not chosen by.

        Args:
            values: the table's [L, Hkv].
            chosen: bool [L, Hkv], the heads that it chooses.
            num_documents: on which ``gains`` were measured, if that is known.
        """
        clear = gains.values > _CLEAR * np.nan_to_num(gains.standard_error, nan=0.0)
        saved = np.where(clear.any(), gains.values.clip(0.0), np.nan)
        left_out, error = _share(saved, gains.standard_error, ~chosen)
        rho, interval = spearman(values.ravel(), gains.values.ravel()) or (None, None)
        missed = [
            Missed(int(layer), int(head), float(gains.values[layer, head]), float(gains.standard_error[layer, head]))
            for layer, head in np.argwhere(clear & ~chosen)
        ]
        return cls(
            rho,
            interval,
            budget=int(chosen.sum()),
            left_out=left_out,
            left_out_error=error,
            left_out_nats=float(saved[~chosen].sum()),
            missed=() if _are_few(num_documents) else tuple(sorted(missed, key=lambda head: -head.gain)),
            num_documents=num_documents,
        )

    def sentence(self) -> str:
        """How well the table orders the heads, and what its choice leaves out."""
        if math.isnan(self.left_out):
            return "no head's gain, opened alone, stands out of the noise: how far the order can be trusted is open"
        order = "the table orders what opening single heads saves"
        if self.rho is not None:
            order += f" with Spearman {self.rho:+.2f}"
        if self.interval is not None:
            low, high = self.interval
            order += f" (95 % interval {low:+.2f} to {high:+.2f})"
        share = f"{order}; its {self.budget} heads leave out {self.share()} of the gains"
        if _are_few(self.num_documents):
            return f"{share}; measured on {self.num_documents} documents, too few to rely on"
        return f"{share}, most in {self.missed[0]}" if self.missed else share

    def share(self) -> str:
        """Such as "12 ± 3 %"."""
        error = "" if math.isnan(self.left_out_error) else f" ± {100 * self.left_out_error:.0f}"
        return f"{100 * self.left_out:.0f}{error} %"


def _are_few(num_documents: int | None) -> bool:
    """Whether gains are known to come from too few documents to name heads by."""
    return num_documents is not None and num_documents < FEWEST_DOCUMENTS


def _share(saved: Float, errors: Float, part: Mask) -> tuple[float, float]:
    """The share of ``saved`` that ``part`` of the heads has, and its standard error, that of a ratio."""
    total = float(saved.sum())
    share = float(saved[part].sum()) / total
    return share, _norm(np.where(saved > 0, (part - share) * errors, 0.0)) / total


def _norm(errors: Float) -> float:
    return float(np.sqrt((errors**2).sum()))
