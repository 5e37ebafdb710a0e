"""The commands that train: a recipe, its layouts, its ablations, and the paper's toy task."""

from __future__ import annotations

from spkv_nas.cli import show
from spkv_nas.cli.console import reporter, say, say_where
from spkv_nas.stages.options import AblateOptions, PalindromeOptions, TrainHybridOptions, TrainOptions


def train(options: TrainOptions) -> None:
    """Train a recipe's dense model and its SP-KV reference; prints where the checkpoints are. Resumes."""
    from spkv_nas.stages import train as stage

    trained = stage.train(options, reporter)
    say(f"dense checkpoint: {trained.dense}\nSP-KV reference:  {trained.reference}")


def train_hybrid(options: TrainHybridOptions) -> None:
    """Retrain every layout, full attention and SP-KV from one dense checkpoint. Writes reports/NAME/comparison.csv.

    A finished run is not run again, an interrupted one resumes: repeat the same command. Where the retrained
    checkpoints are is printed and written to reports/NAME/checkpoints.csv; spkv-nas export takes them.
    """
    from spkv_nas.stages import train as stage

    show.comparison(stage.train_hybrid(options, reporter))


def ablate(options: AblateOptions) -> None:
    """Train variants of one recipe and compare them with the first. Writes reports/NAME/ablations.csv. Resumes.

    A row is a section of a recipe with other values (gates: {window: 8}), {variant: full-attention}, or
    {layout: FILE}; see the README.
    """
    from spkv_nas.stages import train as stage

    result = stage.ablate(options, reporter)
    show.ablations(result)
    say_where("table", result.folder / "ablations.csv")


def palindrome(options: PalindromeOptions) -> None:
    """The paper's toy task: reverse a list from beyond the window. Writes reports/NAME/palindrome.csv and its figure.

    Trains three small models from scratch: full attention, a sliding window of 32, SP-KV with window 32. A finished
    one is not trained again, an interrupted one resumes: repeat the same command.
    """
    from spkv_nas.stages import train as stage

    result = stage.palindrome(options, reporter)
    show.palindrome(result.rows)
    say_where("figure", result.folder / "palindrome.png")
