"""Declare the options of the ``probe`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass

from spkv_nas.artifacts import defaults, kinds
from spkv_nas.base import errors, flag
from spkv_nas.evaluation.thresholds import check_tau
from spkv_nas.probing.signals import DENSITY, SIGNALS, WINDOW_COSTS, Signal, parse_sinks
from spkv_nas.stages import flags
from spkv_nas.stages.options import REFERENCE, DocumentOptions, Trains

_SCORING = ", ".join(signal.name for signal in SIGNALS if signal.computes_logits)


@dataclass(frozen=True, kw_only=True)
@flags.with_options_of(SIGNALS, "probe")
class ProbeOptions(DocumentOptions, Trains):
    """Measure the density of every KV head, or another signal. Writes probes/NAME/, or probes/NAME-SIGNAL/.

    Without arguments, measures the embedded reference on held-out standard library text. With --model and --data,
    measures another checkpoint: by density if it has gates, else by head gates, the recommended signal (minutes).
    With --signal density, a checkpoint without gates first gets gates for the budget, trained with its weights frozen;
    densities also show which keys a cache can drop. With a recipe, trains the reference and then probes it.
    Measures how much attention is on the first tokens of a text, and gives layouts as many sink tokens as that needs.
    """

    recipe: flags.OptionalRecipeFile = None
    max_tokens: flags.OptionalMaxTokens = flag.default(
        None, f"all; {defaults.SCORING_TOKENS:,} for {_SCORING}"
    )
    signal: flags.Signal = flag.default(
        None,
        f"{DENSITY.name} if the model has gates, "
        f"{WINDOW_COSTS.name} with --memory, else {defaults.RECOMMENDED}",
    )
    window: flags.OptionalWindow = flag.default(
        None, "the model's, else the best for --memory, else 1/16 of a block, at most 128"
    )
    sinks: flags.SinksOrAuto = flag.default(None, "auto")
    memory: flags.Memory = flag.default(
        None,
        note=(
            "Replaces --budget, and chooses the window with the heads. "
            "Counted for sequences of --context tokens."
        ),
    )
    separator: flags.Separator = flag.default(None, "measured on the model")
    # Options of signals that the stage reads too
    tau: float | None = None
    ablation_tokens: int | None = None
    steps: int | None = None
    budget: str | None = None
    seed: int | None = None
    granularity: str | None = None


def check(options: ProbeOptions) -> None:
    """Check the options that its signal takes, and either recipe or model."""
    from spkv_nas.stages import checks, subject

    # Without either, the default signal depends on the model's config
    if options.signal is not None or options.recipe is not None:
        chosen_signal(options)
    check_tau(options.tau)
    parse_sinks(options.sinks)
    check_memory(options)
    # Check the model and its text, or the recipe
    if options.recipe is None:
        subject.Subject.of(options, REFERENCE, "probe on").check()
    elif options.model is not None or options.data:
        raise errors.UserError(
            "give a recipe, or --model with --data, not both: the recipe sets model and text"
        )
    else:
        checks.check_recipe(options.recipe)


def check_memory(options: ProbeOptions) -> None:
    """Check the limit of memory, if it is given. Raises ``UserError`` if other options exclude it."""
    from spkv_nas.cost.cache_cost import parse_memory

    if options.memory is None:
        return
    parse_memory(options.memory)
    if options.budget is not None:
        raise errors.UserError(
            "give --memory or --budget, not both: the memory says how many heads are global"
        )
    if options.signal is not None and SIGNALS[options.signal].needs_gates:
        raise errors.UserError(
            f"signal {options.signal} has the window of its gates: give --memory to propose instead"
        )
    if options.granularity == kinds.LAYER:
        raise errors.UserError(
            "--memory counts single heads: leave out --memory, or --granularity layer"
        )


def chosen_signal(options: ProbeOptions) -> Signal:
    """Return the signal with its options, by default density with gates or a recipe; ``UserError`` if one is wrong."""
    signal = SIGNALS[options.signal or _default_signal(options)]
    values = {name: getattr(options, name) for name in SIGNALS.shared_options()}
    SIGNALS.check_options(signal, values)
    return signal.with_options(values)


def _default_signal(options: ProbeOptions) -> str:
    """Return the name of the signal that is measured by default."""
    if options.recipe is not None:
        return DENSITY.name
    from spkv_nas.model.checkpoint import read_gates
    from spkv_nas.stages.subject import Subject

    subject = Subject.of(options, REFERENCE, "probe on")
    if read_gates(subject.source) is not None:
        return DENSITY.name
    return defaults.RECOMMENDED if options.memory is None else WINDOW_COSTS.name
