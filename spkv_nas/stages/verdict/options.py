"""Declare the options of the ``verdict`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag
from spkv_nas.stages.judging import JudgingOptions, check_judging, is_layout

Candidates = Annotated[list[str], Flag("Checkpoints, and layout files (YAML).", metavar="CANDIDATE", argument=True)]


@dataclass(frozen=True, kw_only=True)
class VerdictOptions(JudgingOptions):
    """Options of the ``verdict`` command."""

    candidates: Candidates


def check(options: VerdictOptions) -> None:
    """Check the margins, the risk, the candidates, the text, and the criteria's options."""
    from spkv_nas.model.source import check_checkpoint
    from spkv_nas.stages.checks import check_exist

    check_judging(options)
    for candidate in options.candidates:
        if is_layout(candidate):
            check_exist([candidate], "layout")
        else:
            check_checkpoint(candidate)
