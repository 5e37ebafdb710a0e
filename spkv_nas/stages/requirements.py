"""Read the constraints on layouts from options, in the form that ``proposal`` takes."""

from __future__ import annotations

from dataclasses import replace

from spkv_nas.base.units import parse_context
from spkv_nas.proposal.constraints import Constraints, parse_layers
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.stages.engines import chosen_engine
from spkv_nas.stages.options import ConstraintOptions, LayerOptions


def read_constraints(options: LayerOptions) -> Constraints:
    """Read the constraints on layouts that all commands take from options. Raises ``UserError`` if one is invalid."""
    return Constraints(
        min_per_layer=options.min_per_layer,
        max_per_layer=options.max_per_layer,
        global_layers=parse_layers(options.global_layers, "--global-layers"),
        local_layers=parse_layers(options.local_layers, "--local-layers"),
        granularity=options.granularity,
    )


def read_requirements(options: ConstraintOptions) -> Requirements:
    """Read layout constraints and cache from options. Raises ``UserError`` if one is invalid."""
    return Requirements(
        replace(read_constraints(options), uniform=options.uniform),
        context=None if options.context is None else parse_context(options.context),
        batch=options.batch,
        head_dim=options.head_dim,
        kv_dtype=options.kv_dtype,
        serving=chosen_engine(options),
    )
