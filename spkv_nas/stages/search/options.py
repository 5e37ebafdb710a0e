"""Declare the options of the ``search`` command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.artifacts.defaults import SAMPLER
from spkv_nas.base.flag import Flag, default
from spkv_nas.proposal.budget import PAPER_BUDGET
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.stages import flags
from spkv_nas.stages.options import EMBEDDED_RECIPE, ONLY_PROBE, Trains

Objective = Annotated[
    str,
    Flag(
        "Objectives: nll; or nll,kv-bytes or nll,time for the Pareto front of both.", metavar="NAMES",
        values=("nll", "nll,kv-bytes", "nll,time"),
    ),
]  # fmt: skip
Trials = Annotated[int, Flag("Number of layouts to score without training.", low=1, high=10**6)]
Sampler = Annotated[
    str,
    Flag(
        f"Sampler of layouts: {'; '.join(f'{entry.name} ({entry.help})' for entry in SAMPLERS)}.",
        values=SAMPLERS.names,
    ),
]
Retrain = Annotated[
    int,
    Flag(
        "Number of best layouts to retrain, beside the best start and the given ones: for a quarter of the recipe's "
        "steps, then in full unless behind the median; 0 retrains none, not even those.",
        low=0, high=10**6,
    ),
]  # fmt: skip
Storage = Annotated[str | None, Flag("URL of the study's database, such as postgresql://...")]


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Trains):
    """Options of the ``search`` command."""

    layouts: flags.OptionalLayoutFiles = default(
        note="Retrained, too; those within budget, window and constraints are also started from."
    )
    budget: flags.OptionalBudgets = default(None, PAPER_BUDGET)
    probe: flags.OptionalProbe = default(None, ONLY_PROBE, note="Guides the search.")
    recipe: flags.RecipeOption = default(None, EMBEDDED_RECIPE, note="Retrains the layouts.")
    objective: Objective = "nll"
    trials: Trials = 100
    sampler: Sampler = SAMPLER
    retrain: Retrain = 4
    max_tokens: flags.MaxTokens = default(65_536, note="Held-out text for selection; at most half of it.")
    context: flags.OptionalContext = None
    min_per_layer: flags.MinPerLayer = None
    max_per_layer: flags.MaxPerLayer = None
    global_layers: flags.GlobalLayers = None
    local_layers: flags.LocalLayers = None
    granularity: flags.Granularity = "head"
    storage: Storage = default(None, "SQLite in runs/NAME/search/")
    name: flags.Name = default(None, "the probe's")
    seed: flags.Seed = 0
