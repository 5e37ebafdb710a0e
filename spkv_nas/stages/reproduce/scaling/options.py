"""Declare the options of the ``reproduce scaling`` command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace

Runs = Annotated[
    Path | None,
    Flag(
        "CSV with a row per run. Columns: train_flops (training compute), nll (nats per token); optional: name, "
        "variant (such as dense or sp-kv, each fitted separately) and held_out (1: predicted, not fitted).",
        argument=True,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(InWorkspace):
    """Options of the ``reproduce scaling`` command."""

    runs: Runs = default(None, "the paper's levels")
    name: flags.Name = None
