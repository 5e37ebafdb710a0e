"""Density: the share of keys that SP-KV gates keep (``probing.density``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from spkv_nas.artifacts.defaults import ABLATION_TOKENS, PRICED_STEPS
from spkv_nas.artifacts.kinds import DENSITY as KIND
from spkv_nas.artifacts.kinds import DENSITY_UNIT
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_WHOLE
from spkv_nas.probing.flags import Budget, Seed, Steps
from spkv_nas.probing.signal import Signal
from spkv_nas.proposal.budget import PAPER_BUDGET

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.cost.stage_costs import StageCost, Stages

_TAU = Flag("Gate threshold in [0, 1]; a higher one keeps fewer keys.")
_ABLATION_TOKENS = Flag(
    "Tokens for the add-one-head ablation that validates the ranking; 0 skips it.", low=0, high=MAX_WHOLE
)


@dataclass(frozen=True)
class Density(Signal):
    """Share of keys that the gates keep; on a model without gates, ``probe`` trains them first."""

    name, help = "density", "share of keys that SP-KV gates keep"
    kind, unit = KIND, DENSITY_UNIT
    needs_gates = True
    stage_name = "probe"
    reads_blocks = False  # the gates have their own window, and open gates have a density, too
    used_by_command = ("ablation_tokens", "steps", "budget", "seed")

    tau: Annotated[float | None, _TAU] = default(None, "the checkpoint's")
    ablation_tokens: Annotated[int, _ABLATION_TOKENS] = ABLATION_TOKENS
    # Of the gates that a model has yet to learn
    steps: Steps = PRICED_STEPS
    budget: Budget = default(None, PAPER_BUDGET)
    seed: Seed = 0

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> HeadScores:
        """Measure the density at ``tau``; the window is that of the gates."""
        from spkv_nas.probing.density import probe

        return probe(model, blocks, tau=self.tau, **run)

    def cost(self, stages: Stages, tokens: int) -> StageCost:
        """Return the cost of a pass with gates and without logits."""
        return stages.measure(self.stage_name, tokens, gated=True, scored=False)


DENSITY = Density()
