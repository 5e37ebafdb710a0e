"""Declare the options of the ``probe`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts import defaults
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import default
from spkv_nas.probing.registry import SIGNALS
from spkv_nas.probing.signals.density import DENSITY
from spkv_nas.stages import flags
from spkv_nas.stages.options import REFERENCE, SubjectOptions, Trains
from spkv_nas.stages.probe.signal_flags import with_signal_options

_SCORING = ", ".join(signal.name for signal in SIGNALS if signal.computes_logits)


@dataclass(frozen=True, kw_only=True)
@with_signal_options
class ProbeOptions(SubjectOptions, Trains):
    """Options of the ``probe`` command, including those of every signal."""

    recipe: flags.OptionalRecipeFile = None
    max_tokens: flags.OptionalMaxTokens = default(None, f"all; {defaults.SCORING_TOKENS:,} for {_SCORING}")
    signal: flags.Signal = default(None, f"{DENSITY.name} if the model has gates, else {defaults.RECOMMENDED}")
    window: flags.OptionalWindow = default(None, "the model's, else 1/16 of a block, at most 128")
    sinks: flags.SinksOrAuto = default(None, "auto")
    # Options of signals that the stage reads too
    tau: float | None = None
    ablation_tokens: int | None = None
    steps: int | None = None
    budget: str | None = None
    seed: int | None = None
    granularity: str | None = None


def check(options: ProbeOptions) -> None:
    """Check the options that its signal takes, and either recipe or model."""
    from spkv_nas.evaluation.thresholds import check_tau
    from spkv_nas.probing.flags import parse_sinks
    from spkv_nas.probing.registry import check_options, signal_options
    from spkv_nas.stages.checks import check_recipe
    from spkv_nas.stages.subject import Subject

    signal = options.signal or (DENSITY.name if options.recipe is not None else None)
    if signal is not None:  # else the default depends on the model's config
        check_options(signal, **{option.name: getattr(options, option.name) for option in signal_options()})
    check_tau(options.tau)
    parse_sinks(options.sinks)
    if options.recipe is None:
        Subject.of(options, REFERENCE, "probe on").check()
    elif options.model is not None or options.data:
        raise UserError("give a recipe, or --model with --data, not both: the recipe sets model and text")
    else:
        check_recipe(options.recipe)
