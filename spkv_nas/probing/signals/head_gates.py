"""Head gates: one learned gate per KV head, under a budget (``probing.head_gates``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.defaults import FROZEN_STEP_PASSES, HEAD_GATE_STEPS, LEARNING_TOKENS
from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.kinds import GATE_UNIT
from spkv_nas.base.flag import default
from spkv_nas.probing.flags import Budget, Seed, Steps
from spkv_nas.probing.signal import Signal, Work
from spkv_nas.proposal.budget import PAPER_BUDGET

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.cost.stage_costs import StageCost, Stages


@dataclass(frozen=True)
class HeadGates(Signal):
    """Gate that each head learns while the gates of all heads sum to the budget."""

    name, help = "head-gates", "one gate per head, learned under a budget"
    unit = GATE_UNIT
    takes_sinks = True

    steps: Steps = HEAD_GATE_STEPS
    budget: Budget = default(None, PAPER_BUDGET)
    seed: Seed = 0

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> HeadScores:
        """Learn the gates with ``steps``, ``budget`` and ``seed``; ``sinks`` is 0 by default, not measured again."""
        from spkv_nas.probing.head_gates import head_gates

        options: dict[str, Any] = {"steps": self.steps, "budget": self.budget, "seed": self.seed}
        return head_gates(model, blocks, window, **{"sinks": 0, **options, **run})

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes over the tokens of a step."""
        return Work(self.steps, LEARNING_TOKENS, FROZEN_STEP_PASSES)

    def cost(self, stages: Stages, tokens: int) -> StageCost:
        """Return the cost of training gates of heads on a frozen model."""
        from spkv_nas.probing.frozen import ROOM

        return stages.learn_gates(self.stage_name, self.steps, LEARNING_TOKENS, ROOM, of_keys=False)


HEAD_GATES = HeadGates()
