"""Declare the options of the ``evaluate ruler`` command, and check them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_REPEATS
from spkv_nas.contrib import defaults
from spkv_nas.stages import flags
from spkv_nas.stages.evaluate.options import CheckpointOptions, check_checkpoints

Samples = Annotated[int | None, Flag("Samples per task and length.", low=1, high=MAX_REPEATS)]


@dataclass(frozen=True, kw_only=True)
class RulerOptions(CheckpointOptions):
    """Options of the ``evaluate ruler`` command."""

    lengths: flags.Lengths
    tasks: flags.RulerTasks = default(None, "all")
    samples: Samples = default(None, str(defaults.RULER_SAMPLES))
    haystack: flags.Haystack = default(None, "RULER's noise")
    qa: flags.Questions = default(None, "none; qa_1 and qa_2 are skipped")
    window: flags.OptionalWindow = default(None, "the checkpoint's", note="Applies to the floor.")
    seed: flags.Seed = 0


def check(options: RulerOptions) -> None:
    """Check the threshold, the checkpoints, lengths, tasks and material."""
    check_checkpoints(options)
    check_questions(options.lengths, options.tasks, options.haystack, options.qa)


def check_questions(lengths: str, tasks: str | None, haystack: Sequence[str] | None, qa: Sequence[str] | None) -> None:
    """Check the lengths, the tasks and the material of RULER's questions, as the options give them.

    Raises:
        UserError: a length is no number, a task is unknown, or a file does not exist.
    """
    from pathlib import Path

    from spkv_nas.base.units import parse_context
    from spkv_nas.data.readers import open_source
    from spkv_nas.data.ruler.tasks import check_task
    from spkv_nas.stages.checks import check_exist

    for length in lengths.split(","):
        parse_context(length)
    for task in [] if tasks is None else tasks.split(","):
        check_task(task.strip())
    for source in haystack or ():
        open_source(source, Path())
    check_exist(qa or (), "questions")
