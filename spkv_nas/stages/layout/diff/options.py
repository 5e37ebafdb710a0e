"""Declare the options of the ``layout diff`` command."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.stages import flags


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Options of the ``layout diff`` command."""

    a: flags.LayoutFile
    b: flags.LayoutFile
