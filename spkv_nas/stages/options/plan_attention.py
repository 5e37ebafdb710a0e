"""Declare the options of the ``plan attention`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors, flag, units
from spkv_nas.stages import flags
from spkv_nas.stages.options import LONGEST, REFERENCE, InWorkspace, TakesLong


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(InWorkspace, TakesLong):
    """Compute KV-cache bytes, FLOPs and time per token of full attention, layouts, and SP-KV at a density.

    FLOPs follow Kaplan et al., 2 N + 2 L d_attn keys, averaged over the positions of a causal sequence. Times cover
    the attention of all layers, and are shown where spkv-nas calibrate measured this shape on this machine. For the
    memory of a layout in a serving engine, see spkv-nas plan MODEL --engine.
    """

    command = "plan attention"

    level: flags.Level = None
    model: flags.OptionalModel = flag.default(None, REFERENCE, note="A config file is enough.")
    layout: flags.Layouts = None
    density: flags.Density = None
    context: flags.OptionalContext = flag.default(None, LONGEST)
    window: flags.Window = flag.default(128, note="Applies to --density.")
    sinks: flags.OptionalSinks = flag.default(None, "0", note="Applies to --density.")
    calibration: flags.CalibrationName = flag.default(
        None, "the level's or model's, if one matches"
    )


def check(options: AttentionOptions) -> None:
    """Check model, context, density and layouts."""
    from spkv_nas.cost.formulas import visible_keys
    from spkv_nas.stages import checks

    checks.check_model_size(options.level, options.model)
    tokens = 1 if options.context is None else units.parse_context(options.context)
    if options.density is not None:
        visible_keys(tokens, density=options.density, window=options.window + (options.sinks or 0))
    elif options.sinks is not None:
        raise errors.UserError(
            "--sinks applies to --density alone; layouts have their own: remove it"
        )
    for file in options.layout or ():
        Layout.read(file)
