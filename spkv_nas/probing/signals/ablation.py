"""Single-head ablations: the NLL saved by adding one head alone, or lost by removing it alone (``probing.gains``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.kinds import GAIN, NATS
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_SIZE
from spkv_nas.probing.flags import GRANULARITIES, HEAD
from spkv_nas.probing.signal import Signal, Work

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores

_GRANULARITY = Flag("Choose single heads, or only whole layers.", metavar="head|layer", values=GRANULARITIES)
_MAX_HEADS = Flag(
    "Maximum number of heads to measure individually, in the layers that gain most.", low=1, high=MAX_SIZE
)


@dataclass(frozen=True)
class Ablation(Signal):
    """Gain of each head, switched alone.

    Attributes:
        opens: True to make heads global in an all-local model, False to make them local in an all-global one.
    """

    kind, unit = GAIN, NATS
    computes_logits, takes_sinks, cached_layers = True, True, 1.0
    opens: ClassVar[bool]

    granularity: Annotated[str, _GRANULARITY] = HEAD
    max_heads: Annotated[int | None, _MAX_HEADS] = default(None, "all")

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> HeadScores:
        """Measure the gains with ``granularity`` and ``max_heads``."""
        from spkv_nas.probing.gains import gains

        options: dict[str, Any] = {"granularity": self.granularity, "max_heads": self.max_heads}
        return gains(self.name, model, blocks, window, opens=self.opens, **options, **run)

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes that all heads take, measured singly."""
        return Work(ablation_passes(grid), tokens)


def ablation_passes(grid: Grid) -> float:
    """Return the forward passes needed to measure every head of a (layers, KV heads) grid, including the baseline."""
    num_layers, num_heads = grid
    return 1.0 + (num_layers + 1) / 2 * num_heads


@dataclass(frozen=True)
class AddOneHead(Ablation):
    """Make single heads global in an all-local model."""

    name, help = "add-one-head", "NLL saved by making one head global in an all-local model"
    opens = True


@dataclass(frozen=True)
class LeaveOneOut(Ablation):
    """Make single heads local in an all-global model."""

    name, help = "leave-one-out", "NLL lost by making one head local in an all-global model"
    opens = False


ADD_ONE_HEAD, LEAVE_ONE_OUT = AddOneHead(), LeaveOneOut()
