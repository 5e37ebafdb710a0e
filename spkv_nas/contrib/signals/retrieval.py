"""Retrieval score: attention on the token to copy, in repeated random strings (``measure.retrieval``)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.kinds import ATTENTION_UNIT
from spkv_nas.probing.signals import Seed, Signal

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores


@dataclass(frozen=True)
class Retrieval(Signal):
    """Attention weight on the earlier copy of the token to predict."""

    name = "retrieval"
    help = "attention on the token to copy, in repeated random strings"
    unit = ATTENTION_UNIT
    takes_sinks = True
    reads_blocks = False  # but random strings

    seed: Seed = 0

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> "HeadScores":
        """Measure the score, with needles drawn by ``seed``."""
        from spkv_nas.contrib.signals.measure.retrieval import retrieval

        return retrieval(model, blocks, window, seed=self.seed, **run)


RETRIEVAL = Retrieval()
