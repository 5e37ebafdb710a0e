"""Declare the options of the ``evaluate baselines`` command, and parse them; the class's docstring is the help."""

import math
from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base import errors, flag
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import CHECKPOINT_TAU, DENSE, SubjectOptions

STREAMING = "streaming"
RANDOM = "random"
KVZAP = "kvzap"
H2O = "h2o"
EXPECTED = "expected-attention"
METHODS = (STREAMING, RANDOM, KVZAP, H2O, EXPECTED)

EXACT = "exact"
KVPRESS = "kvpress"
PROTOCOLS = (EXACT, KVPRESS)

TOKENS = 16_384  # of text to evaluate on by default

Methods = Annotated[
    str | None,
    flag.Flag(
        "Comma-separated methods that choose the keys to keep.", metavar="NAMES", values=METHODS
    ),
]
Densities = Annotated[
    str,
    flag.Flag(
        "Comma-separated shares to keep of the keys outside the window.", ("--density",), "N%|LIST"
    ),
]
Sinks = Annotated[
    str,
    flag.Flag(
        "Comma-separated numbers of attention sinks: first keys of a block, always kept.",
        metavar="N|LIST",
    ),
]
ReadingProtocol = Annotated[
    str,
    flag.Flag(
        "exact: each query sees exactly --window recent keys. kvpress: each sees the --window "
        "keys before its chunk, and the chunk's keys up to its own.",
        metavar="|".join(PROTOCOLS),
        values=PROTOCOLS,
    ),
]


@dataclass(frozen=True, kw_only=True)
class BaselinesOptions(SubjectOptions):
    """Prune a dense model's KV cache by training-free methods at equal density. Writes reports/NAME/baselines.csv.

    streaming keeps only sinks and the window; random, kvzap, h2o and expected-attention also keep a share of the other
    keys. With --against, an SP-KV checkpoint is measured on the same text. kvzap is fitted on documents that are not
    measured.
    """

    model: flags.Model = DENSE
    max_tokens: flags.OptionalMaxTokens = flag.default(None, f"{TOKENS:,}")
    methods: Methods = flag.default(None, "all")
    densities: Densities = "20%,15%"
    window: flags.OptionalWindow = flag.default(
        None, "the window of --against, else 1/16 of a block, at most 128"
    )
    sinks: Sinks = "0,4"
    protocol: ReadingProtocol = EXACT
    against: flags.Against = flag.default(note="Must be an SP-KV checkpoint (with gates).")
    taus: flags.OptionalTaus = flag.default(None, CHECKPOINT_TAU, note="Applies to --against.")


def check(options: BaselinesOptions) -> None:
    """Check the lists of settings, the checkpoints and the text."""
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


def parse_methods(text: str | None) -> list[str]:
    """Parse comma-separated methods, in the order of ``METHODS``; None selects all. Raises ``UserError``."""
    names = METHODS if text is None else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise errors.UserError(
            f"unknown method '{unknown[0]}' in --methods; choose from {', '.join(METHODS)}"
        )
    return [name for name in METHODS if name in names]


def parse_densities(text: str) -> list[float]:
    """Parse comma-separated shares of keys in (0, 1], such as ``20%,0.15``, highest first. Raises ``UserError``."""
    return sorted({_density(part.strip()) for part in text.split(",")}, reverse=True)


def parse_sinks(text: str) -> list[int]:
    """Parse comma-separated numbers of sink tokens, such as ``0,4``, ascending. Raises ``UserError``."""
    return sorted({_sinks(part.strip()) for part in text.split(",")})


def _density(text: str) -> float:
    """Parse one density, in percent or as a fraction."""
    try:
        density = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        density = math.nan
    if not 0.0 < density <= 1.0:
        raise errors.UserError(
            f"--density must lie in (0, 1]; found '{text}'; give for example 20% or 0.2"
        )
    return density


def _sinks(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise errors.UserError(
            f"--sinks must be whole numbers of tokens; found '{text}'; give for example 0,4"
        )
    return int(text)


BASELINES = commands.Command("baselines", commands.runner(BaselinesOptions))
