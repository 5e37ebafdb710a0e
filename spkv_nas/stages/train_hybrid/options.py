"""Declare the options of the ``train-hybrid`` command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags
from spkv_nas.stages.options import EMBEDDED_RECIPE, ONLY_PROBE, InPrecision, Trains

Reference = Annotated[bool, Flag("Also retrain the SP-KV reference, with its gates.", ("--reference/--no-reference",))]


@dataclass(frozen=True, kw_only=True)
class TrainHybridOptions(Trains, InPrecision):
    """Options of the ``train-hybrid`` command."""

    layouts: flags.OptionalLayoutFiles = default(None, "all of layouts/NAME/")
    recipe: flags.RecipeOption = default(None, EMBEDDED_RECIPE, note="Its dense model is retrained.")
    probe: flags.OptionalProbe = default(None, ONLY_PROBE)
    seeds: flags.Seeds = default(1, note="Each has a different data order.")
    reference: Reference = True
