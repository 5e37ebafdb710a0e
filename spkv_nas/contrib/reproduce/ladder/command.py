"""Declare the options of the ``reproduce ladder`` command, and run it; its docstring is the help."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.flag import default
from spkv_nas.base.progress import Reporter
from spkv_nas.contrib.defaults import LADDER_DENSITY, PAPER
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace
from spkv_nas.stages.result import Result


@dataclass(frozen=True, kw_only=True)
class LadderOptions(InWorkspace):
    """Options of the ``reproduce ladder`` command."""

    density: flags.Density = default(None, f"{LADDER_DENSITY:g}")
    context: flags.Context = "128k"
    name: flags.Name = default(None, PAPER)


def check(options: LadderOptions) -> None:
    """Check context and density."""
    from spkv_nas.base.units import parse_context
    from spkv_nas.cost.formulas import visible_keys

    visible_keys(parse_context(options.context), density=LADDER_DENSITY if options.density is None else options.density)


def ladder(options: LadderOptions, reporter: Reporter) -> Result:
    """Compute FLOPs per token of the paper's model ladder: full attention, and SP-KV at a density.

    Writes reports/NAME/flops.csv and a figure of FLOPs against model size.
    """
    from spkv_nas.base.units import parse_context
    from spkv_nas.contrib.reproduce.ladder import stage

    context, density = parse_context(options.context), LADDER_DENSITY if options.density is None else options.density
    return Result(stage.ladder(options.folders, options.name or PAPER, context, density), stage.show)
