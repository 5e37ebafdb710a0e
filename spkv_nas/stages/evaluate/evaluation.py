"""Describe a subcommand of ``evaluate``: an entry of ``EVALUATIONS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.result import Results


@dataclass(frozen=True)
class Evaluation:
    """Subcommand of ``evaluate``.

    Attributes:
        name: name of the subcommand.
        run: measures a checkpoint. Its first parameter is annotated with a dataclass whose fields become the options,
            and its docstring is the help. A function ``check`` beside that dataclass checks the options first.
        distributed: whether several processes of torchrun can share the work.
    """

    name: str
    run: Callable[[Any, Reporter], Results | None]
    distributed: bool = False
