"""Declare the options of the ``reproduce palindrome`` command; the class's docstring is the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags, options

BatchSize = Annotated[int | None, Flag("Sequences per training step.", low=1, high=2**20)]
# Defaults
STEPS = 500
BATCH_SIZE = 32
NAME = "palindrome"  # default name of the results


@dataclass(frozen=True, kw_only=True)
class PalindromeOptions(options.InWorkspace, options.OnDevice):
    """Train the paper's toy task, reversing a list that lies beyond the window, with three kinds of attention.

    Trains three small models from scratch: full attention, a sliding window of 32, SP-KV with window 32. Writes
    reports/NAME/palindrome.csv and a figure. Runs resume where they stopped; finished ones are reused.
    """

    steps: flags.Steps = default(None, str(STEPS), note="Applies to each model.")
    batch_size: BatchSize = default(None, str(BATCH_SIZE))
    seed: flags.Seed = default(0, note="Used for weights, predictors and sequences.")
    name: flags.Name = default(None, NAME)
