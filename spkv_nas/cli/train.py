"""Commands ``ablate`` and ``palindrome``."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.cli import show
from spkv_nas.stages.options import AblateOptions, PalindromeOptions
from spkv_nas.stages.result import Result


def ablate(options: AblateOptions, reporter: Reporter) -> Result:
    """Train variants of one recipe and compare them with the first. Writes reports/NAME/ablations.csv. Resumes.

    A row is a section of a recipe with other values (gates: {window: 8}), {variant: full-attention}, or
    {layout: FILE}; see "Recipes and training" in the documentation.
    """
    from spkv_nas.stages.train import stage

    return Result(stage.ablate(options, reporter), show.ablations)


def palindrome(options: PalindromeOptions, reporter: Reporter) -> Result:
    """Run the paper's toy task: reverse a list from beyond the window. Writes reports/NAME/palindrome.csv and a figure.

    Trains three small models from scratch: full attention, a sliding window of 32, SP-KV with window 32. A finished
    one is not trained again, an interrupted one resumes: repeat the same command.
    """
    from spkv_nas.stages.train import stage

    return Result(stage.palindrome(options, reporter), show.palindrome)
