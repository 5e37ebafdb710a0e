"""Print what ``export`` wrote."""

from __future__ import annotations

from spkv_nas.base.console import say
from spkv_nas.model.export.export import Exported


def show(exported: Exported) -> None:
    """Print what was written, why not as an earlier target, what engines do with it, and the target."""
    say(str(exported))
    say(f"target: {exported.target}")
