"""Declare the options of the ``evaluate ruler`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.artifacts import defaults
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_REPEATS
from spkv_nas.stages import flags
from spkv_nas.stages.evaluate.options import CheckpointOptions, check_checkpoints

LENGTHS = Flag("Comma-separated prompt lengths in tokens, such as 512,4k.", metavar="LENGTHS")
Lengths = Annotated[str, LENGTHS]
RulerTasks = Annotated[str | None, Flag("Comma-separated RULER tasks, such as niah_single_1,vt.", metavar="NAMES")]
Samples = Annotated[int | None, Flag("Samples per task and length.", low=1, high=MAX_REPEATS)]
Haystack = Annotated[list[str] | None, Flag("Essays to hide needles in: files or folders; repeat for several.")]
Questions = Annotated[
    list[str] | None,
    Flag("Question files of SQuAD (qa_1) or HotpotQA (qa_2); repeat for both.", metavar="FILE.json"),
]


@dataclass(frozen=True, kw_only=True)
class RulerOptions(CheckpointOptions):
    """Options of the ``evaluate ruler`` command."""

    lengths: Lengths
    tasks: RulerTasks = default(None, "all")
    samples: Samples = default(None, str(defaults.RULER_SAMPLES))
    haystack: Haystack = default(None, "RULER's noise")
    qa: Questions = default(None, "none; qa_1 and qa_2 are skipped")
    window: flags.OptionalWindow = default(None, "the checkpoint's", note="Applies to the floor.")
    seed: flags.Seed = 0


def check(options: RulerOptions) -> None:
    """Check the threshold, the checkpoints, lengths, tasks and material."""
    from pathlib import Path

    from spkv_nas.base.units import parse_context
    from spkv_nas.data.readers import open_source
    from spkv_nas.data.ruler.tasks import check_task
    from spkv_nas.stages.checks import check_exist

    check_checkpoints(options)
    for length in options.lengths.split(","):
        parse_context(length)
    for task in [] if options.tasks is None else options.tasks.split(","):
        check_task(task.strip())
    for source in options.haystack or ():
        open_source(source, Path())
    check_exist(options.qa or (), "questions")
