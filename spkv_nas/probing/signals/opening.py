"""Add-one-head ablation (``opening``): the NLL that a head saves when it alone is global (``probing.gains``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.kinds import GAIN, NATS
from spkv_nas.probing.flags import ABLATION_OPTIONS, ablation_passes
from spkv_nas.probing.signal import Signal, Work

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores


class Opening(Signal):
    """Gain of each head, added alone to a model whose heads are all local."""

    name, help = "opening", "NLL saved by making one head global in an all-local model"
    kind, unit = GAIN, NATS
    computes_logits, cached_layers = True, 1.0
    options = ABLATION_OPTIONS

    def measure(self, model: Any, blocks: Any, window: int, **options: Any) -> HeadScores:
        """Measure the gains with ``granularity`` and ``max_heads``."""
        from spkv_nas.probing.gains import opening

        return opening(model, blocks, window, **options)

    def work(self, grid: Grid, tokens: int, block_size: int, **options: Any) -> Work:
        """Return the passes that all heads take, measured singly."""
        return Work(ablation_passes(grid), tokens)


OPENING = Opening()
