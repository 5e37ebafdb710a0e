"""Retrieval score: attention on the token to copy, in repeated random strings (``measure.retrieval``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.kinds import ATTENTION_UNIT
from spkv_nas.probing.flags import SEED_OPTION
from spkv_nas.probing.signal import Signal

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores


class Retrieval(Signal):
    """Attention weight on the earlier copy of the token to predict."""

    name, help = "retrieval", "attention on the token to copy, in repeated random strings"
    unit = ATTENTION_UNIT
    takes_sinks = True
    options = (SEED_OPTION,)

    def measure(self, model: Any, blocks: Any, window: int, **options: Any) -> HeadScores:
        """Measure the score, with needles drawn by ``seed``."""
        from spkv_nas.contrib.signals.measure.retrieval import retrieval

        return retrieval(model, blocks, window, **options)


RETRIEVAL = Retrieval()
