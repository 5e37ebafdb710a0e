"""Density: the share of keys that SP-KV gates keep (``probing.density``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.defaults import ABLATION_TOKENS, PRICED_STEPS
from spkv_nas.artifacts.kinds import DENSITY as KIND
from spkv_nas.artifacts.kinds import DENSITY_UNIT
from spkv_nas.base.flag import Flag
from spkv_nas.base.limits import MAX_WHOLE
from spkv_nas.probing.flags import BUDGET_OPTION, SEED_OPTION, STEPS
from spkv_nas.probing.signal import Option, Signal

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.cost.stage_costs import StageCost, Stages

_TAU = Flag("Gate threshold in [0, 1]; a higher one keeps fewer keys.")
_ABLATION_TOKENS = Flag(
    "Tokens for the add-one-head ablation that validates the ranking; 0 skips it.", low=0, high=MAX_WHOLE
)


class Density(Signal):
    """Share of keys that the gates keep; on a model without gates, ``probe`` trains them first."""

    name, help = "density", "share of keys that SP-KV gates keep"
    kind, unit = KIND, DENSITY_UNIT
    needs_gates = True
    stage_name = "probe"
    options = (
        Option("tau", float, _TAU, shown="the checkpoint's"),
        Option("ablation_tokens", int, _ABLATION_TOKENS, ABLATION_TOKENS, is_measured=False),
        # Of the gates that a model has yet to learn
        Option("steps", int, STEPS, PRICED_STEPS, is_measured=False),
        replace(BUDGET_OPTION, is_measured=False),
        replace(SEED_OPTION, is_measured=False),
    )

    def measure(self, model: Any, blocks: Any, window: int, **options: Any) -> HeadScores:
        """Measure the density at ``tau``; the window is that of the gates."""
        from spkv_nas.probing.density import probe

        return probe(model, blocks, **options)

    def cost(self, stages: Stages, tokens: int, **options: Any) -> StageCost:
        """Return the cost of a pass with gates and without logits."""
        return stages.measure(self.stage_name, tokens, gated=True, scored=False)


DENSITY = Density()
