"""Print the checkpoints of ``train``."""

from __future__ import annotations

from spkv_nas.base.console import say
from spkv_nas.stages.train.stage import Trained


def show(result: Trained) -> None:
    """Print the paths of a recipe's checkpoints."""
    say(f"dense checkpoint: {result.dense}\nSP-KV reference:  {result.reference}")
