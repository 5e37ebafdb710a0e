"""Measure the samples of a criterion in rounds, in a random order that is the same for every model.

A round is the unit that is stored: an interrupted verdict resumes after the last finished one, and gives the same
answer. So rounds must not depend on the machine. Where samples depend on the dense model, such as continuations that it
writes, it prepares each round once for all candidates, and that is stored too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.arrays import Array

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Float = NDArray[np.float64]
Prepared = Mapping[str, NDArray[Any]]  # arrays of a round that the dense model prepared, by name
NO_SCORE = -1.0  # of a sample that turns out to have none


class Rounds(ABC):
    """Samples of a criterion, in rounds of ``size``, of which the last may be shorter.

    ``identity`` is a text of everything that the samples depend on besides the model; ``prepared`` are the arrays that
    the dense model prepares for each round.
    """

    size = 16
    identity: str
    num_samples: int
    prepared: tuple[Array, ...] = ()

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds."""
        return -(-self.num_samples // self.size)

    def part(self, index: int) -> slice:
        """Return the samples of a round."""
        return slice(index * self.size, (index + 1) * self.size)

    def prepare(self, index: int, dense: PreTrainedModel) -> dict[str, NDArray[Any]]:
        """Return the arrays ``prepared`` of a round; called only if there are any."""
        return {}

    @abstractmethod
    def measure(self, index: int, model: PreTrainedModel, prepared: Prepared) -> Float:
        """Measure a round: finite numbers, at least one; ``NO_SCORE`` for samples to leave out."""

    def scores(self, measured: Sequence[Float]) -> Float:
        """Return one score per sample that the first rounds, measured in order, complete."""
        scores: Float = np.concatenate([np.empty(0), *measured])[: self.num_samples]
        return np.asarray(scores[scores != NO_SCORE])
