"""Summarize how well a head table ranks the heads, measured by the gains of single heads, each added alone.

These gains (``artifacts.head_tables``) are noisy and ignore interactions: heads of largest gain lose more, once
retrained, than those chosen by head gates (``reports/study``). So they describe a table but recommend nothing, and no
optimum over the gains, chosen and evaluated on the same tokens, is reported. Standard errors treat heads as
independent; as heads gain on the same documents, the true errors are up to 1.7 times as large (reports/LOG.md).
"""

import math
from dataclasses import dataclass

import numpy as np

from spkv_nas.artifacts.head_tables import Gains
from spkv_nas.base.arrays import Float, Mask
from spkv_nas.evaluation.ranking import spearman

_CLEAR = 2.0  # standard errors above which a head's gain is significant
MIN_DOCUMENTS = 8  # minimum number of documents for naming single heads


@dataclass(frozen=True)
class MissedHead:
    """A head that the table leaves out, with its gain in nats per token."""

    layer: int
    kv_head: int
    gain: float
    standard_error: float

    def __str__(self) -> str:
        """Return for example "layer 3, head 1 (0.012 ± 0.003 nats)"."""
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.3f}"
        return f"layer {self.layer}, head {self.kv_head} ({self.gain:.3f}{error} nats)"


@dataclass(frozen=True)
class Trust:
    """Agreement of a head table with the gains of adding single heads.

    ``rho`` is Spearman's correlation, with a 95 % interval over resamples of the heads; None where it is not defined.
    Of all positive gains, the share ``left_out`` in [0, 1] belongs to the heads that the ``budget`` chosen ones
    exclude; NaN if no gain is significant. ``missed`` are those of significant gain, largest first; none where
    documents are few.
    """

    rho: float | None
    interval: tuple[float, float] | None
    budget: int
    left_out: float
    left_out_error: float
    missed: tuple[MissedHead, ...]
    num_documents: int | None = None

    @classmethod
    def of(cls, values: Float, chosen: Mask, gains: Gains, num_documents: int | None = None) -> "Trust":
        """Judge a table [L, Hkv] and the heads that it chooses by gains that were not used to choose them."""
        # Keep all positive gains, provided that at least one is significant
        significant = gains.values > _CLEAR * np.nan_to_num(gains.standard_error, nan=0.0)
        saved = np.where(significant.any(), gains.values.clip(0.0), np.nan)
        total, is_left_out = float(saved.sum()), ~chosen
        left_out = float(saved[is_left_out].sum()) / total
        residuals = np.where(saved > 0, (is_left_out - left_out) * gains.standard_error, 0.0)
        rho, interval = spearman(values.ravel(), gains.values.ravel()) or (None, None)
        # List the significant heads that the table leaves out
        missed = [
            MissedHead(
                int(layer), int(head), float(gains.values[layer, head]), float(gains.standard_error[layer, head])
            )
            for layer, head in np.argwhere(significant & ~chosen)
        ]
        return cls(
            rho,
            interval,
            budget=int(chosen.sum()),
            left_out=left_out,
            left_out_error=float(np.linalg.norm(residuals)) / total,
            missed=() if _are_few(num_documents) else tuple(sorted(missed, key=lambda head: -head.gain)),
            num_documents=num_documents,
        )

    def sentence(self) -> str:
        """Return one sentence on how well the table ranks the heads, and which gains its selection excludes."""
        if math.isnan(self.left_out):
            return "no single-head gain exceeds the noise, so the ranking cannot be validated"
        order = "the table was compared with single-head gains"
        if self.rho is not None:
            order = f"the table's ranking of single-head gains has Spearman {self.rho:+.2f}"
        if self.interval is not None:
            low, high = self.interval
            order += f" (95 % interval {low:+.2f} to {high:+.2f})"
        share = f"{order}; its {self.budget} heads exclude {self.share()} of the gains"
        if _are_few(self.num_documents):
            return f"{share}; measured on {self.num_documents} documents, too few to rely on"
        return f"{share}, most in {self.missed[0]}" if self.missed else share

    def share(self) -> str:
        """Return the left-out share with its error, for example "12 ± 3 %"."""
        error = "" if math.isnan(self.left_out_error) else f" ± {100 * self.left_out_error:.0f}"
        return f"{100 * self.left_out:.0f}{error} %"


def _are_few(num_documents: int | None) -> bool:
    """Return True if the gains are known to come from too few documents to name heads by."""
    return num_documents is not None and num_documents < MIN_DOCUMENTS
