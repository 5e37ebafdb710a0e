"""Declare the ``propose`` command: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_REPEATS
from spkv_nas.base.progress import Reporter
from spkv_nas.proposal.budget import PAPER_BUDGET
from spkv_nas.proposal.registry import STRATEGIES
from spkv_nas.stages import flags
from spkv_nas.stages.options import ONLY_PROBE, ConstraintOptions, InWorkspace
from spkv_nas.stages.result import Result

NumRandom = Annotated[int, Flag("Number of random layouts.", low=0, high=MAX_REPEATS)]
KvBytes = Annotated[
    str | None,
    Flag("Memory for keys and values, such as 2GiB, instead of --budget.", metavar="SIZE", panel=flags.MEMORY),
]
Robust = Annotated[
    bool, Flag("Maximise the coverage of the worst domain, not of all text.", ("--robust",), panel=flags.MEMORY)
]
HeadCosts = Annotated[
    Path | None,
    Flag(
        "Cost of each global head instead of 1: CSV with layer, kv_head, weight. The budget is in its unit.",
        metavar="FILE.csv",
        panel=flags.MEMORY,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ProposeOptions(ConstraintOptions, InWorkspace):
    """Options of the ``propose`` command."""

    budget: flags.OptionalBudgets = default(None, PAPER_BUDGET)
    probe: flags.OptionalProbe = default(None, ONLY_PROBE)
    tau: flags.ChosenTau = None
    window: flags.OptionalWindow = default(None, "the probe's")
    sinks: flags.OptionalSinks = default(None, "the probe's")
    num_random: NumRandom = 3
    seed: flags.Seed = 0
    kv_bytes: KvBytes = None
    robust: Robust = False
    head_costs: HeadCosts = None


def propose(options: ProposeOptions, reporter: Reporter) -> Result:
    """Propose layouts for a budget of global heads, with every strategy. Writes layouts/NAME/.

    A constraint, --robust or --head-costs adds the best layout that satisfies it. Several budgets give the best layout
    at each of them, and the curve of coverage against budget in layouts/NAME/budgets.csv.
    """
    from spkv_nas.stages.propose import output, stage

    if stage.is_for_several(options):
        return Result(stage.propose_several(options, reporter), output.show_budgets, output.budgets_document)
    result = stage.propose(options, reporter)
    return Result(result, output.show, output.document, next=result.next)


# The help lists the strategies of the registry, those of installed packages included
_STRATEGIES = "; ".join(f"{strategy.name}: {strategy.help}" for strategy in STRATEGIES)
propose.__doc__ = f"{propose.__doc__}\n    Strategies: {_STRATEGIES}.\n    "
