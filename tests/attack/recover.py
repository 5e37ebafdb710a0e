"""Check that the same command, now undisturbed, arrives at the undisturbed result."""

from __future__ import annotations

import re

from attack.arena import Expected, Run
from attack.commands import Command
from attack.tally import Round

ERROR = "error:"


def resume(round_: Round, command: Command, expected: Expected, story: str, but: str = "") -> None:
    """Run the command on the ground; check that it ends well and with the same files, except for ``but``."""
    run = round_.arena.run(command)
    round_.note("resumed")
    if command.once and is_clear_error(run) and not round_.arena.differences(expected):
        round_.note("same")  # it had finished, and says that it does not write over what is there
    elif run.status is None:
        round_.fail("hung", f"{story}; resumed", run)
    elif run.status or run.has_traceback:
        round_.fail("traceback" if run.has_traceback else "not resumed", f"{story}; resumed", run)
    elif wrong := [
        line for line in round_.arena.differences(expected) if not (but and re.search(but, line))
    ]:
        round_.fail("differed", f"{story}; resumed", run, wrong)
    else:
        round_.note("same")


def is_clear_error(run: Run) -> bool:
    """Return whether a command ended with a user error: exit code 2, a message, no traceback."""
    return run.status == 2 and ERROR in run.err and not run.has_traceback
