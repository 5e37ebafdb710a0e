"""Declare the options of the ``schema`` command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag

SchemaOf = Annotated[
    str, Flag("File format: layout or recipe.", metavar="layout|recipe", argument=True, values=("layout", "recipe"))
]


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """Options of the ``schema`` command."""

    of: SchemaOf = "layout"
