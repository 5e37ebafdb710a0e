"""Declare the options of the ``evaluate ruler`` command, and check them; the class's docstring is the help."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base import flag, limits
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import CheckpointOptions

SAMPLES = 100  # per task and length by default
_LENGTHS = flag.Flag("Comma-separated prompt lengths in tokens, such as 512,4k.", metavar="LENGTHS")
Lengths = Annotated[str, _LENGTHS]
OptionalLengths = Annotated[str | None, _LENGTHS]
RulerTasks = Annotated[
    str | None, flag.Flag("Comma-separated RULER tasks, such as niah_single_1,vt.", metavar="NAMES")
]
Haystack = Annotated[
    list[str] | None, flag.Flag("Essays to hide needles in: files or folders; repeat for several.")
]
Questions = Annotated[
    list[str] | None,
    flag.Flag(
        "Question files of SQuAD (qa_1) or HotpotQA (qa_2); repeat for both.", metavar="FILE.json"
    ),
]
Samples = Annotated[
    int | None, flag.Flag("Samples per task and length.", low=1, high=limits.MAX_REPEATS)
]


@dataclass(frozen=True, kw_only=True)
class RulerOptions(CheckpointOptions):
    """Score RULER's tasks by the share of correct answers at each length. Writes reports/NAME/ruler.csv.

    The floor is the score of the same checkpoint with every head local. With --against, another checkpoint answers the
    same questions. Answers are kept in runs/NAME/ruler/ and reused.
    """

    lengths: Lengths
    tasks: RulerTasks = flag.default(None, "all")
    samples: Samples = flag.default(None, str(SAMPLES))
    haystack: Haystack = flag.default(None, "RULER's noise")
    qa: Questions = flag.default(None, "none; qa_1 and qa_2 are skipped")
    window: flags.OptionalWindow = flag.default(
        None, "the checkpoint's", note="Applies to the floor."
    )
    seed: flags.Seed = 0


def check(options: RulerOptions) -> None:
    """Check the lengths, tasks and material."""
    check_questions(options.lengths, options.tasks, options.haystack, options.qa)


def check_questions(
    lengths: str, tasks: str | None, haystack: Sequence[str] | None, qa: Sequence[str] | None
) -> None:
    """Check the lengths, the tasks and the material of RULER's questions, as the options give them."""
    from pathlib import Path

    from spkv_nas.base.units import parse_context
    from spkv_nas.data.readers import check_source
    from spkv_nas.data.ruler.tasks import check_task
    from spkv_nas.stages.checks import check_exist

    for length in lengths.split(","):
        parse_context(length)
    for task in [] if tasks is None else tasks.split(","):
        check_task(task.strip())
    for source in haystack or ():
        check_source(source, Path())
    check_exist(qa or (), "questions")


RULER = commands.Command("ruler", commands.runner(RulerOptions), distributed=True)
