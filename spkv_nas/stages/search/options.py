"""Declare the options of the ``search`` command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.artifacts.defaults import COMPARED_SAMPLER, SAMPLER
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_REPEATS, MAX_STEPS
from spkv_nas.proposal.budget import PAPER_BUDGET
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.stages import flags
from spkv_nas.stages.options import EMBEDDED_RECIPE, ONLY_PROBE, ConstraintOptions, InPrecision, Trains

_EFFORT = "How much to search"  # panel of the help

Start = Annotated[list[Path] | None, Flag("Layout to start from, beside the strategies'; repeat for several.")]
Objective = Annotated[
    str,
    Flag(
        "Objectives: nll; or nll,kv-bytes or nll,time for the Pareto front of both.", metavar="NAMES",
        values=("nll", "nll,kv-bytes", "nll,time"),
    ),
]  # fmt: skip
Trials = Annotated[
    int, Flag("Number of layouts to score without training, per sampler and seed.", low=1, high=10**6, panel=_EFFORT)
]
TrialsPerRound = Annotated[
    int,
    Flag(
        "Number of layouts sampled at once; workers share the layouts of a round.",
        low=1,
        high=MAX_REPEATS,
        panel=_EFFORT,
    ),
]
Sampler = Annotated[
    str,
    Flag(
        f"Samplers of layouts, comma-separated: {'; '.join(f'{entry.name} ({entry.help})' for entry in SAMPLERS)}.",
        metavar="NAMES", values=SAMPLERS.names, panel=_EFFORT,
    ),
]  # fmt: skip
CompareSamplers = Annotated[
    str,
    Flag(
        "Baseline samplers to compare with, comma-separated, or none.",
        metavar="NAMES",
        values=(*SAMPLERS.names, "none"),
        panel=_EFFORT,
    ),
]
Signals = Annotated[
    list[str] | None,
    Flag(
        "Further head scores that surrogate learns from, such as a probe of another signal; repeat for several.",
        metavar="NAME|FILE", is_probe=True, panel=_EFFORT,
    ),
]  # fmt: skip
Racing = Annotated[
    bool,
    Flag(
        "Stop scoring a layout once it is two standard errors behind the best finished one of at most its cost.",
        ("--racing/--no-racing",),
        panel=_EFFORT,
    ),
]
NumShort = Annotated[
    int, Flag("Number of best layouts of each sampler to retrain briefly.", low=0, high=10**6, panel=_EFFORT)
]
NumFull = Annotated[int, Flag("Number of the best of those to retrain in full.", low=0, high=10**6, panel=_EFFORT)]
ShortSteps = Annotated[int | None, Flag("Number of steps of a short retraining.", low=1, high=MAX_STEPS, panel=_EFFORT)]
Storage = Annotated[str | None, Flag("URL of the study's database, such as postgresql://...")]


@dataclass(frozen=True, kw_only=True)
class SearchOptions(ConstraintOptions, Trains, InPrecision):
    """Options of the ``search`` command."""

    layouts: flags.OptionalLayoutFiles = default(note="Compared with the search, beside the strategies' layouts.")
    start: Start = None
    budget: flags.OptionalBudgets = default(None, PAPER_BUDGET)
    probe: flags.OptionalProbe = default(None, ONLY_PROBE, note="Guides the search.")
    tau: flags.ChosenTau = None
    recipe: flags.RecipeOption = default(None, EMBEDDED_RECIPE, note="Retrains the layouts.")
    objective: Objective = "nll"
    trials: Trials = 100
    seeds: flags.Seeds = default(1, note="Studies per sampler.")
    trials_per_round: TrialsPerRound = 10
    sampler: Sampler = SAMPLER
    compare_samplers: CompareSamplers = COMPARED_SAMPLER
    signals: Signals = None
    racing: Racing = True
    num_short: NumShort = 8
    num_full: NumFull = 4
    short_steps: ShortSteps = default(None, "a quarter of the recipe's")
    max_tokens: flags.MaxTokens = default(65_536, note="Held-out text for selection; at most half of it.")
    calibration: flags.CalibrationName = default(None, "this name's")
    hardware: flags.Hardware = None
    window: flags.OptionalWindow = default(None, "the probe's")
    storage: Storage = default(None, "SQLite in runs/NAME/search/")
    name: flags.Name = default(None, "the probe's")
    seed: flags.Seed = 0
