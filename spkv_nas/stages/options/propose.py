"""Declare the options of the ``propose`` command; the class's docstring is the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.artifacts.defaults import SOLUTIONS_APART
from spkv_nas.base import flag, limits
from spkv_nas.proposal.budget import PAPER_BUDGET
from spkv_nas.proposal.strategies import STRATEGIES
from spkv_nas.stages import flags, options


@dataclass(frozen=True, kw_only=True)
class ProposeOptions(
    options.LayerOptions, options.EngineOptions, options.ChoosesProbe, options.TakesLong
):
    """Propose layouts for a budget of global heads, with every strategy. Writes layouts/NAME/.

    A constraint, --robust or --head-costs adds the best layout that satisfies it, and costs of windows add one with a
    window per head. Several budgets give the best layout at each, and their curve in layouts/NAME/budgets.csv.
    """

    context: flags.OptionalContext = None
    batch: flags.Batch = 1
    budget: flags.OptionalBudgets = flag.default(None, PAPER_BUDGET)
    tau: flags.ChosenTau = None
    window: flags.OptionalWindow = flag.default(None, "the probe's")
    sinks: flags.OptionalSinks = flag.default(None, "the probe's")
    num_random: Annotated[
        int, flag.Flag("Number of random layouts.", low=0, high=limits.MAX_REPEATS)
    ] = 3
    seed: flags.Seed = 0
    memory: flags.Memory = flag.default(None, note="Replaces --budget.")
    robust: Annotated[
        bool,
        flag.Flag(
            "Maximise the coverage of the worst domain, not of all text.",
            ("--robust",),
            panel=flags.MEMORY,
        ),
    ] = False
    head_costs: Annotated[
        Path | None,
        flag.Flag(
            "Cost of each global head instead of 1: "
            "CSV with layer, kv_head, weight. The budget is in its unit.",
            metavar="FILE.csv",
            panel=flags.MEMORY,
        ),
    ] = None
    solutions: Annotated[
        str | None,
        flag.Flag(
            "Also write the N best layouts, the best included, "
            "that differ from each other in at least "
            f"{SOLUTIONS_APART} KV heads, or in as many as apart says.",
            metavar="N[:apart=HEADS]",
        ),
    ] = None


# The help lists the strategies of the registry, those of installed packages included
_listed = "; ".join(f"{strategy.name}: {strategy.help}" for strategy in STRATEGIES)
ProposeOptions.__doc__ = f"{ProposeOptions.__doc__}\n    Strategies: {_listed}.\n    "
