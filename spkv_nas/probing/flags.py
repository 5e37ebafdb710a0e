"""Flags that several signals share. Imports nothing heavy, because every ``--help`` loads it."""

from __future__ import annotations

from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag
from spkv_nas.base.limits import MAX_SEED, MAX_STEPS, MAX_WINDOW

STEPS = Flag("Training steps.", low=1, high=MAX_STEPS)
SEED = Flag("Random seed.", low=0, high=MAX_SEED)
BUDGET = Flag("Number of global KV heads, or a share such as 25%.", ("--budget", "-b"), "N|N%")
Steps = Annotated[int, STEPS]
Seed = Annotated[int, SEED]
Budget = Annotated[str | None, BUDGET]
GRANULARITIES = HEAD, LAYER = "head", "layer"

SINKS = Flag(
    "Sink tokens: first tokens of a sequence that a local head sees besides its window. auto: 0, 1, 2 or 4, by the "
    "model's measured attention on first tokens; a layout or gates of the model keep their own number.",
    metavar="auto|N",
)


def parse_sinks(text: str | None) -> int | None:
    """Return the number of sink tokens that a user chose; None for "auto" or no choice.

    Raises:
        UserError: ``text`` is neither "auto" nor a whole number within bounds.
    """
    if text in (None, "auto"):
        return None
    if not str(text).isdecimal() or int(str(text)) > MAX_WINDOW:
        raise UserError(f"--sinks must be auto or a number of tokens up to {MAX_WINDOW}; found '{text}'")
    return int(str(text))
