"""Declare the options of the ``evaluate longppl`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_BLOCK_SIZE
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import CheckpointOptions, SubjectOptions

SHORT_CONTEXT = 4096  # tokens, as of the LongPPL authors
MAX_LENGTH = 1 << 15  # tokens per text by default
Evaluator = Annotated[
    str | None,
    Flag("Checkpoint that selects the key tokens; its gates are all open.", metavar="CHECKPOINT"),
]
ShortContext = Annotated[
    int | None, Flag("Length of the short context in tokens.", low=1, high=MAX_BLOCK_SIZE)
]


@dataclass(frozen=True, kw_only=True)
class LongPPLOptions(CheckpointOptions, SubjectOptions):
    """Measure the perplexity of tokens that only the long context makes likely. Writes reports/NAME/longppl.csv.

    An evaluator checkpoint selects these key tokens once, so that all checkpoints are measured on the same ones.
    Without --data, the text is the held-out standard library text of the embedded models. Key tokens and NLL by text
    are kept in runs/NAME/longppl/ and reused.
    """

    context: flags.TextContext = default(
        None, f"the models' maximum, at most {MAX_LENGTH >> 10}k", note="Here the maximum per text."
    )
    evaluator: Evaluator = default(None, "--against, or the model")
    short_context: ShortContext = default(None, f"{SHORT_CONTEXT:,}, at most 1/4 of a text")


def check(options: LongPPLOptions) -> None:
    """Check the evaluator and the text."""
    from spkv_nas.model.source import check_checkpoint
    from spkv_nas.stages.subject import Subject

    subject = Subject.evaluated(options)
    if options.evaluator is not None:
        check_checkpoint(options.evaluator)
    subject.check(in_blocks=False)


LONGPPL = commands.Command("longppl", commands.runner(LongPPLOptions), distributed=True)
