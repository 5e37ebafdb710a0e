"""Read the serving engine and the constraints on layouts from options, in the form that ``proposal`` takes."""

from spkv_nas.base import units
from spkv_nas.engines.engine import Serving
from spkv_nas.engines.registry import read_serving
from spkv_nas.proposal import constraints, requirements
from spkv_nas.stages.options import EngineOptions, LayerOptions, propose


def chosen_engine(options: EngineOptions) -> Serving | None:
    """Return the engine that options name, if any, with its settings. Raises ``UserError`` as ``read_serving``."""
    return None if options.engine is None else read_serving(options.engine)


def read_constraints(options: LayerOptions) -> constraints.Constraints:
    """Read the constraints on layouts that all commands take from options. Raises ``UserError`` if one is invalid."""
    return constraints.Constraints.parse(options.constraint or (), options.granularity)


def read_requirements(options: propose.ProposeOptions) -> requirements.Requirements:
    """Read the requirements on layouts from options. Raises ``UserError`` if one is invalid."""
    return requirements.Requirements(
        read_constraints(options),
        context=None if options.context is None else units.parse_context(options.context),
        batch=options.batch,
        serving=chosen_engine(options),
        robust=options.robust,
        head_costs=options.head_costs,
        kv_bytes=options.memory,
    )
