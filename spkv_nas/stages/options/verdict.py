"""Declare the options of ``verdict``, some shared by ``critical-budget``, and check them; docstrings are the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import assets, errors, hub
from spkv_nas.base.flag import Flag, default
from spkv_nas.evaluation.verdict.criteria import (
    Margins,
    criteria_help,
    options_help,
    parse_margins,
    parse_risk,
)
from spkv_nas.model.source import check_checkpoint
from spkv_nas.stages import flags
from spkv_nas.stages.options import DENSE, DocumentOptions

Margin = Annotated[
    str,
    Flag(
        "Largest loss allowed, by criterion, with the criterion's options after colons: "
        "nll=1%,ruler=2:lengths=512,4k. "
        f"{criteria_help()}.",
        metavar="NAME=LOSS[:OPTION=VALUE...],...",
    ),
]
Risk = Annotated[
    str,
    Flag("Largest probability of a wrong pass, and of a wrong failure, such as 5%.", metavar="N%"),
]


@dataclass(frozen=True, kw_only=True)
class DecisionOptions(DocumentOptions):
    """Options of the commands that compare candidates with a dense model until the answer is known."""

    model: Annotated[
        str,
        Flag(
            "Checkpoint to compare with; layouts are tried on its weights.",
            ("--against",),
            "CHECKPOINT",
        ),
    ] = DENSE
    margin: Margin = "nll=1%"
    risk: Risk = "5%"
    max_tokens: flags.OptionalMaxTokens = default(
        None, "one block per document, at least 128 blocks"
    )


def is_layout(candidate: str) -> bool:
    """Return whether a candidate is a layout, in a file or on the Hub, rather than a checkpoint."""
    return hub.is_on_hub(candidate) or candidate.lower().endswith((".yaml", ".yml"))


def check_decision(options: DecisionOptions) -> None:
    """Check the margins with the criteria's options, the risk, the dense model and the text."""
    from spkv_nas.stages.subject import Subject

    parse_risk(options.risk)
    margins = parse_margins(options.margin)
    if (
        reads_text(margins)
        and not options.model.startswith(assets.EMBEDDED_PREFIX)
        and not options.data
    ):
        raise errors.UserError(
            "--against needs --data: files or folders with text that no candidate was selected on"
        )
    Subject.of(options, DENSE, "compare on", reads_text=reads_text(margins)).check()
    for criterion, _ in margins:
        criterion.check()


def reads_text(margins: Margins) -> bool:
    """Return whether a criterion reads text."""
    return any(criterion.reads_text for criterion, _ in margins)


@dataclass(frozen=True, kw_only=True)
class VerdictOptions(DecisionOptions):
    """Decide whether layouts or checkpoints lose less than a margin against a dense model.

    Writes reports/NAME/verdict.csv.

    Candidates are checkpoints, or layout files, which are tried on the weights of --against without training. Both
    models are measured sample by sample, in random order, until the answer is known: passes if the loss is below every
    margin of --margin, fails if it is above one, else open. That any candidate passes wrongly, and that any fails
    wrongly, has a probability of at most --risk each, however early it stops. Documents that a layout was selected on
    are left out, even if the probe that says so was deleted.

    Exits with 0 if a candidate passes, 1 if all fail, 3 otherwise. Samples are kept in runs/NAME/verdict/ and reused.
    """

    candidates: Annotated[
        list[str], Flag("Checkpoints, and layout files (YAML).", metavar="CANDIDATE", argument=True)
    ]


VerdictOptions.__doc__ = f"{VerdictOptions.__doc__}\n\n{options_help()}\n"


def check(options: VerdictOptions) -> None:
    """Check the margins, the risk, the candidates, the text, and the criteria's options."""
    check_decision(options)
    for candidate in options.candidates:
        if is_layout(candidate):
            Layout.read(candidate)
        else:
            check_checkpoint(candidate)
