"""Declare the options of the ``layout show`` command."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.base.flag import default
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace


@dataclass(frozen=True, kw_only=True)
class ShowLayoutsOptions(InWorkspace):
    """Options of the ``layout show`` command."""

    files: flags.LayoutFiles
    probe: flags.OptionalProbe = default(note="Used to compute coverage.")
