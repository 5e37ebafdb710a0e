"""Print what ``export`` wrote."""

from __future__ import annotations

from spkv_nas.base.console import say
from spkv_nas.model.export.export import Exported
from spkv_nas.serving.engine_check import EngineCheck


def show(exported: Exported) -> None:
    """Print what was written, why not as an earlier target, what engines do with it, and the target."""
    say(str(exported))
    say(f"target: {exported.target}")


def show_check(check: EngineCheck) -> None:
    """Print how an inference engine compares with the model."""
    say(str(check))
