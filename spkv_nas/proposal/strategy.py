"""Define what a strategy is: a rule that chooses the global heads for a budget.

A strategy is a frozen dataclass whose fields are its options (``base.entry``); its name is that of the layout, of its
file and of its row in comparisons, so it must be a valid file name. The built-in ones are listed in
``proposal.strategies``; a package adds its own by an entry point of the group ``spkv_nas.strategies``. ``propose``,
``init``, ``search``, their help and the report take it from there.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.entry import Entry

if TYPE_CHECKING:  # reads pandas, which takes too long for --help
    from spkv_nas.artifacts.head_scores import HeadScores

Mask = NDArray[np.bool_]  # [L, Hkv], true for global
NUM_RANDOM = 3  # layouts of each random strategy by default


class Strategy(Entry, ABC):
    """Choose the global heads of a layout for a budget."""

    # whether the choice depends on the seed. There are several layouts then, "<name>-0" and so on
    is_random: ClassVar[bool] = False
    # whether the layouts only serve as a comparison, so that a search does not start from them
    is_control: ClassVar[bool] = False
    # whether all heads of a layer are alike, so that the budget is rounded to whole layers
    whole_layers: ClassVar[bool] = False

    @abstractmethod
    def choose(self, scores: "HeadScores", budget: int, *, seed: int = 0) -> Mask:
        """Return the mask [L, Hkv] of the global heads, true only where ``scores.is_head``.

        Args:
            scores: head scores, higher for heads that need global attention more.
            budget: number of global KV heads, at least 1.
            seed: random seed; only random strategies use it.
        """

    def names(self, num_random: int = NUM_RANDOM) -> list[str]:
        """Return the names of its layouts, of which a random strategy has ``num_random``."""
        return [f"{self.name}-{number}" for number in range(num_random)] if self.is_random else [self.name]


def densest(density: NDArray[np.float64], budget: int) -> Mask:
    """Return the mask of the ``budget`` heads of highest density [L, Hkv]; ties go to the earlier layer and head."""
    return heads_mask(densest_first(density)[:budget], *density.shape)


def densest_first(density: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return flat indices (layer * Hkv + head) of heads, sorted by descending density [L, Hkv], NaN for no head."""
    return np.argsort(-density.ravel(), kind="stable")[: int(np.isfinite(density).sum())]


def heads_mask(heads: NDArray[np.intp], num_layers: int, num_kv_heads: int) -> Mask:
    """Return the mask [L, Hkv] of flat head indices."""
    mask = np.zeros(num_layers * num_kv_heads, dtype=np.bool_)
    mask[heads] = True
    return mask.reshape(num_layers, num_kv_heads)
