"""Command-line interface: parse the arguments, call the stage, print its result."""

import sys

from spkv_nas.base import console, errors


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, by default ``sys.argv[1:]``, and exit with its code; see ``app.main``."""
    try:
        from spkv_nas.cli import app
    except errors.UserError as error:  # an entry point of another package cannot be loaded
        console.fail(str(error))
        sys.exit(2)
    app.main(arguments)
