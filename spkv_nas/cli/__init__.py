"""Command-line interface: parse the arguments, call the stage, print its result."""

import atexit
import os
import sys
import warnings
from dataclasses import dataclass

from spkv_nas.base import console, errors


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code; see ``app.main``.

    Without ``arguments`` they are ``sys.argv[1:]``, and the process belongs to the command, which ends it.
    """
    if arguments is not None:
        _run(arguments)
        return
    end = _End()
    atexit.register(end.leave)  # before all other functions, so that it runs after them
    try:
        _run(None)
        end.code = 0
    except SystemExit as stop:
        if isinstance(stop.code, int):
            end.code = stop.code
        else:
            end.code = 0 if stop.code is None else 1
        raise


@dataclass
class _End:
    """End of the process, with an exit code: 1 after an exception that nobody caught."""

    code: int = 1

    def leave(self) -> None:
        """Exit at once: Python would first destroy all objects one by one, with torch loaded for a second or more.

        Threads are joined and other exit functions have run when this is called. If output cannot be written, Python
        exits in its own way, which says so.
        """
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            return
        os._exit(self.code)


def _run(arguments: list[str] | None) -> None:
    """Import the app and run it."""
    with warnings.catch_warnings():
        console.show_warnings()
        try:
            from spkv_nas.cli import app  # which loads the entries that packages add
        except errors.UserError as error:  # an entry point of this project cannot be loaded
            console.fail(str(error))
            sys.exit(2)
        app.main(arguments)
