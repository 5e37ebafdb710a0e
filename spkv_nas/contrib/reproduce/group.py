"""Command group ``reproduce``: the paper's experiments, with the options of those that need no training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base import flag, progress
from spkv_nas.contrib.reproduce.ablate.options import AblateOptions
from spkv_nas.contrib.reproduce.palindrome.options import PalindromeOptions
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import InWorkspace, TakesLong

PAPER = "paper"  # default name of results about the paper's model ladder
LADDER_DENSITY = 0.2  # in the figure of FLOPs over the ladder by default
Runs = Annotated[
    Path | None,
    flag.Flag(
        "CSV with a row per run. Columns: train_flops (training compute), nll (nats per token); "
        "optional: name, variant (such as dense or sp-kv, each fitted separately) and held_out "
        "(1: predicted, not fitted).",
        argument=True,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(InWorkspace, TakesLong):
    """Options of the ``reproduce scaling`` command."""

    command = "reproduce scaling"

    runs: Runs = flag.default(None, "the paper's levels")


def scaling(options: ScalingOptions, reporter: progress.Reporter) -> commands.Result:
    """Fit the scaling law L(C) = L_inf + A C^-alpha to training runs, by default the paper's.

    Needs at least four runs of different compute per variant. Predicts the held-out runs. Writes
    scaling.yaml and a figure to reports/NAME/, which is named after the file.
    """
    from spkv_nas.contrib.reproduce.scaling import stage

    name = PAPER if options.runs is None else options.runs.stem
    return commands.Result(stage.scaling(options.folders, name, options.runs), stage.show)


@dataclass(frozen=True, kw_only=True)
class LadderOptions(InWorkspace, TakesLong):
    """Options of the ``reproduce ladder`` command."""

    command = "reproduce ladder"

    density: flags.Density = flag.default(None, f"{LADDER_DENSITY:g}")
    context: flags.Context = "128k"
    name: flags.Name = flag.default(None, PAPER)


def ladder(options: LadderOptions, reporter: progress.Reporter) -> commands.Result:
    """Compute FLOPs per token of the paper's model ladder: full attention, and SP-KV at a density.

    Writes reports/NAME/flops.csv and a figure of FLOPs against model size.
    """
    from spkv_nas.base.units import parse_context
    from spkv_nas.contrib.reproduce import ladder as stage

    context = parse_context(options.context)
    density = LADDER_DENSITY if options.density is None else options.density
    return commands.Result(
        stage.ladder(options.folders, options.name or PAPER, context, density), stage.show
    )


_COMMANDS = (commands.runner(PalindromeOptions), commands.runner(AblateOptions), scaling, ladder)
REPRODUCE = commands.CommandGroup("reproduce", "Reproduce the paper's experiments.", _COMMANDS)
