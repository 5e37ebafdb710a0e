"""The one exception type whose message is meant for the person at the keyboard."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave (a file, a flag, a model), said in one to three lines.

    The message states what is wrong, where, and what to do. The command line prints it without a traceback and
    exits 2; from Python it is an ordinary ``ValueError``.
    """
