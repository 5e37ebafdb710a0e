"""Complete option values in the shell: names of probes and short lists of choices. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from spkv_nas.base.flag import Flag
from spkv_nas.base.workspace import Workspace


def completion(flag: Flag) -> Callable[[typer.Context, str], list[str]] | None:
    """Return the function that completes an option's value, or None to let the shell complete file names."""
    if not flag.values and not flag.is_probe:
        return None

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        workspace = Workspace(Path(context.params.get("workspace") or "."))
        values = flag.values() if callable(flag.values) else flag.values
        if flag.is_probe:
            values = workspace.probes()
        return [value for value in values if value.startswith(incomplete)]

    return complete
