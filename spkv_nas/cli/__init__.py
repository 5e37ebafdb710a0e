"""Command-line interface: parse the arguments, call the stage, print its result."""

from __future__ import annotations

import sys

from spkv_nas.base.console import fail
from spkv_nas.base.errors import UserError


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, by default ``sys.argv[1:]``, and exit with its code; see ``app.main``."""
    try:
        from spkv_nas.cli import app
    except UserError as error:  # an entry point of another package cannot be loaded
        fail(str(error))
        sys.exit(2)
    app.main(arguments)
