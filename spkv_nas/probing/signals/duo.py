"""DuoAttention's alpha: a learned mixture of full and local attention (``probing.duo``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.defaults import DUO_STEP_BLOCKS, DUO_STEPS, FROZEN_STEP_PASSES
from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.kinds import ALPHA_UNIT
from spkv_nas.probing.flags import Seed, Steps
from spkv_nas.probing.signal import Signal, Work

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.cost.stage_costs import StageCost, Stages


@dataclass(frozen=True)
class Duo(Signal):
    """Share of full attention that each head needs to preserve the last hidden states."""

    name, help = "duo", "DuoAttention's learned share of full attention"
    unit = ALPHA_UNIT
    takes_sinks = True

    steps: Steps = DUO_STEPS
    seed: Seed = 0

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> HeadScores:
        """Learn alpha with ``steps`` and ``seed``."""
        from spkv_nas.probing.duo import duo

        return duo(model, blocks, window, steps=self.steps, seed=self.seed, **run)

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes over the blocks of a step."""
        return Work(self.steps, min(tokens, DUO_STEP_BLOCKS * block_size), FROZEN_STEP_PASSES)

    def cost(self, stages: Stages, tokens: int) -> StageCost:
        """Return the cost of training alphas on a frozen model."""
        from spkv_nas.probing.frozen import ROOM

        return stages.learn_gates(self.stage_name, self.steps, DUO_STEP_BLOCKS * stages.block_size, ROOM, of_keys=False)


DUO = Duo()
