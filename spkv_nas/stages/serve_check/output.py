"""Print how an inference engine compares with the model."""

from __future__ import annotations

from spkv_nas.base.console import say
from spkv_nas.serving.engine_check import EngineCheck


def show(check: EngineCheck) -> None:
    """Print the verdict, both comparisons, what the engine runs instead, and its cache."""
    say(str(check))
