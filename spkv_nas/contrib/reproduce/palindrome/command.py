"""Run the ``reproduce palindrome`` command; its docstring is the help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.base.progress import Reporter
from spkv_nas.contrib.reproduce.palindrome.options import PalindromeOptions
from spkv_nas.stages.result import Result

if TYPE_CHECKING:
    from spkv_nas.training.run_plan import Plan


def palindrome(options: PalindromeOptions, reporter: Reporter) -> Result:
    """Train the paper's toy task, reversing a list that lies beyond the window, with three kinds of attention.

    Trains three small models from scratch: full attention, a sliding window of 32, SP-KV with window 32. Writes
    reports/NAME/palindrome.csv and a figure. Runs resume where they stopped; finished ones are reused.
    """
    from spkv_nas.contrib.reproduce.palindrome import stage

    return Result(stage.palindrome(options, reporter), stage.show)


def plan(options: PalindromeOptions, reporter: Reporter) -> Plan:
    """Plan the three models."""
    from spkv_nas.contrib.reproduce.palindrome.plan import plan_palindrome

    return plan_palindrome(options, reporter)
