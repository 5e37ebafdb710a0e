"""A number for trust: how well a table orders what matters, judged by what opening single heads saves.

Opening gains (``artifacts.gains``) are noisy, and know nothing of what heads do together. So only heads whose gain
stands out of its noise are named, and choices are compared by all of their heads. Errors take heads as independent;
that heads gain in the same documents makes the true ones up to 1.7 times as large (reports/LOG.md), so that choices
differ from three such errors on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.gains import Gains
from spkv_nas.evaluation.ranking import spearman

_CLEAR = 2.0  # standard errors of a head's gain from which on it is one
_SURE = 3.0  # of a sum over heads, likewise
_MUCH = 0.1  # share of the gains from which on what is left out for no need is much; less says nothing of whole layouts

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
class Rival:
    """As many heads, chosen by another signal.

    Attributes:
        name: of the probe.
        left_out: share of the gains, as ``Trust.left_out``.
        saved: nats per token that its heads save more, with its standard error.
    """

    name: str
    left_out: float
    saved: float
    standard_error: float

    @property
    def is_better(self) -> bool:
        """Whether it saves more than noise can explain; False where the noise is not known."""
        return self.saved > _SURE * self.standard_error


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
        least: share that the best choice of as many heads would leave out.
        missed: the heads left out whose gains are known from noise, the largest first.
        rivals: choices by other signals, the best first.
    """

    rho: float | None
    interval: tuple[float, float] | None
    budget: int
    left_out: float
    left_out_error: float
    left_out_nats: float
    least: float
    missed: tuple[Missed, ...]
    rivals: tuple[Rival, ...]

    @classmethod
    def of(cls, values: Float, chosen: Mask, gains: Gains, rivals: Mapping[str, Mask] | None = None) -> Trust:
        """Of a table.

        Args:
            values: the table's [L, Hkv].
            chosen: bool [L, Hkv], the heads that it chooses.
            rivals: the same number of heads by name of another probe.
        """
        clear = gains.values > _CLEAR * np.nan_to_num(gains.standard_error, nan=0.0)
        saved = np.where(clear.any(), gains.values.clip(0.0), np.nan)
        left_out, error = _share(saved, gains.standard_error, ~chosen)
        rho, interval = spearman(values.ravel(), gains.values.ravel()) or (None, None)
        rest = np.sort(saved.ravel())[: chosen.size - int(chosen.sum())]
        missed = [
            Missed(int(layer), int(head), float(gains.values[layer, head]), float(gains.standard_error[layer, head]))
            for layer, head in np.argwhere(clear & ~chosen)
        ]
        others = [
            Rival(
                name,
                _share(saved, gains.standard_error, ~mask)[0],
                float(gains.values[mask].sum() - gains.values[chosen].sum()),
                _norm(gains.standard_error[mask != chosen]),
            )
            for name, mask in (rivals or {}).items()
        ]
        return cls(
            rho,
            interval,
            budget=int(chosen.sum()),
            left_out=left_out,
            left_out_error=error,
            left_out_nats=float(saved[~chosen].sum()),
            least=float(rest.sum() / saved.sum()),
            missed=tuple(sorted(missed, key=lambda head: -head.gain)),
            rivals=tuple(sorted(others, key=lambda rival: -rival.saved)),
        )

    @property
    def better(self) -> Rival | None:
        """The rival that saves most, if that is clearly more, and much."""
        return next((one for one in self.rivals if one.is_better and self.left_out - one.left_out > _MUCH), None)

    @property
    def is_poor(self) -> bool:
        """Whether the choice leaves out much that one of as many heads would not."""
        needless = self.left_out - self.least
        return needless > _MUCH and needless > _SURE * self.left_out_error

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
        said = f"{order}; its {self.budget} heads leave out {self.share()} of the gains"
        return f"{said}, most in {self.missed[0]}" if self.missed else said

    def share(self) -> str:
        """Such as "12 ± 3 %"."""
        error = "" if math.isnan(self.left_out_error) else f" ± {100 * self.left_out_error:.0f}"
        return f"{100 * self.left_out:.0f}{error} %"


def _share(saved: Float, errors: Float, part: Mask) -> tuple[float, float]:
    """The share of ``saved`` that ``part`` of the heads has, and its standard error, that of a ratio."""
    total = float(saved.sum())
    share = float(saved[part].sum()) / total
    return share, _norm(np.where(saved > 0, (part - share) * errors, 0.0)) / total


def _norm(errors: Float) -> float:
    return float(np.sqrt((errors**2).sum()))
