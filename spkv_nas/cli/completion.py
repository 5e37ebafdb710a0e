"""What a shell offers for a half-typed value: names in a workspace, choices that are few. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from spkv_nas.base.workspace import Workspace
from spkv_nas.stages.flags import Flag


def completion(flag: Flag) -> Callable[[typer.Context, str], list[str]] | None:
    """What completes an option; None leaves it to the shell, which offers files."""
    if not flag.values and not flag.is_probe:
        return None

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        place = Workspace(Path(context.params.get("workspace") or "."))
        values = place.probes() if flag.is_probe else flag.values
        return [value for value in values if value.startswith(incomplete)]

    return complete
