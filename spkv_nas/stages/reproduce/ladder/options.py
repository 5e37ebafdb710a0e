"""Declare the options of the ``reproduce ladder`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts.defaults import LADDER_DENSITY
from spkv_nas.base.flag import default
from spkv_nas.stages import flags
from spkv_nas.stages.options import PAPER, InWorkspace


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
