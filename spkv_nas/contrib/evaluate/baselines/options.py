"""Declare the options of the ``evaluate baselines`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base import errors, flag
from spkv_nas.contrib import defaults
from spkv_nas.contrib.evaluate.baselines.choices import EXACT, METHODS, PROTOCOLS
from spkv_nas.stages import command_group, flags
from spkv_nas.stages.evaluate.evaluation import CHECKPOINT_TAU, Evaluation
from spkv_nas.stages.options import DENSE, SubjectOptions

Methods = Annotated[
    str | None, flag.Flag("Comma-separated methods that choose the keys to keep.", metavar="NAMES", values=METHODS)
]
Densities = Annotated[
    str, flag.Flag("Comma-separated shares to keep of the keys outside the window.", ("--density",), "N%|LIST")
]
Sinks = Annotated[
    str, flag.Flag("Comma-separated numbers of attention sinks: first keys of a block, always kept.", metavar="N|LIST")
]
ReadingProtocol = Annotated[
    str,
    flag.Flag(
        "exact: each query sees exactly --window recent keys. kvpress: each sees the --window keys before its chunk, "
        "and the chunk's keys up to its own.",
        metavar="|".join(PROTOCOLS), values=PROTOCOLS,
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BaselinesOptions(SubjectOptions):
    """Prune a dense model's KV cache by training-free methods at equal density. Writes reports/NAME/baselines.csv.

    streaming keeps only sinks and the window; random, kvzap, h2o and expected-attention also keep a share of the other
    keys. With --against, an SP-KV checkpoint is measured on the same text. kvzap is fitted on documents that are not
    measured.
    """

    model: flags.Model = DENSE
    max_tokens: flags.OptionalMaxTokens = flag.default(None, f"{defaults.BASELINE_TOKENS:,}")
    methods: Methods = flag.default(None, "all")
    densities: Densities = "20%,15%"
    window: flags.OptionalWindow = flag.default(None, "the window of --against, else 1/16 of a block, at most 128")
    sinks: Sinks = "0,4"
    protocol: ReadingProtocol = EXACT
    against: flags.Against = flag.default(note="Must be an SP-KV checkpoint (with gates).")
    taus: flags.OptionalTaus = flag.default(None, CHECKPOINT_TAU, note="Applies to --against.")


def check(options: BaselinesOptions) -> None:
    """Check the lists of settings, the checkpoints and the text."""
    from spkv_nas.contrib.evaluate.baselines.choices import parse_densities, parse_methods, parse_sinks
    from spkv_nas.evaluation.thresholds import parse_taus
    from spkv_nas.model.source import check_checkpoint
    from spkv_nas.stages.subject import Subject

    parse_methods(options.methods)
    parse_densities(options.densities)
    parse_sinks(options.sinks)
    if options.taus is not None:
        parse_taus(options.taus)
    if options.against is not None:
        check_checkpoint(options.against)
    elif options.taus is not None:
        raise errors.UserError("--taus needs --against with an SP-KV checkpoint")
    Subject.of(options, DENSE, "prune on").check()


BASELINES = Evaluation("baselines", command_group.runner(BaselinesOptions))
