"""Declare the ``reproduce palindrome`` command: its options and its help."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts import defaults
from spkv_nas.base.flag import default
from spkv_nas.base.progress import Reporter
from spkv_nas.stages import flags
from spkv_nas.stages.options import Trains
from spkv_nas.stages.result import Result

NAME = "palindrome"  # default name of the results


@dataclass(frozen=True, kw_only=True)
class PalindromeOptions(Trains):
    """Options of the ``reproduce palindrome`` command."""

    steps: flags.Steps = default(None, str(defaults.PALINDROME_STEPS), note="Applies to each model.")
    batch_size: flags.BatchSize = default(None, str(defaults.PALINDROME_BATCH))
    seed: flags.Seed = default(0, note="Used for weights, predictors and sequences.")
    name: flags.Name = default(None, NAME)


def palindrome(options: PalindromeOptions, reporter: Reporter) -> Result:
    """Train the paper's toy task, reversing a list that lies beyond the window, with three kinds of attention.

    Trains three small models from scratch: full attention, a sliding window of 32, SP-KV with window 32. Writes
    reports/NAME/palindrome.csv and a figure. Runs resume where they stopped; finished ones are reused.
    """
    from spkv_nas.stages.reproduce.palindrome import output, stage

    return Result(stage.palindrome(options, reporter), output.palindrome)
