"""Attention mass: share of attention outside the window (``measure.attention_mass``)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.kinds import ATTENTION_UNIT
from spkv_nas.probing.signals import Signal

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores


@dataclass(frozen=True)
class AttentionMass(Signal):
    """Attention weight on keys outside the window."""

    name = "attention-mass"
    help = "share of attention outside the window"
    unit = ATTENTION_UNIT
    takes_sinks = True

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> "HeadScores":
        """Measure the mass in one pass."""
        from spkv_nas.contrib.signals.measure.attention_mass import attention_mass

        return attention_mass(model, blocks, window, **run)


ATTENTION_MASS = AttentionMass()
