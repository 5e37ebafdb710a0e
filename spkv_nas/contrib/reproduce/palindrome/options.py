"""Declare the options of the ``reproduce palindrome`` command."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.flag import default
from spkv_nas.contrib import defaults
from spkv_nas.stages import flags
from spkv_nas.stages.options import Trains

NAME = "palindrome"  # default name of the results


@dataclass(frozen=True, kw_only=True)
class PalindromeOptions(Trains):
    """Options of the ``reproduce palindrome`` command."""

    steps: flags.Steps = default(None, str(defaults.PALINDROME_STEPS), note="Applies to each model.")
    batch_size: flags.BatchSize = default(None, str(defaults.PALINDROME_BATCH))
    seed: flags.Seed = default(0, note="Used for weights, predictors and sequences.")
    name: flags.Name = default(None, NAME)
