"""Declare the ``schema`` command: its options, their check, and its help."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag
from spkv_nas.base.progress import Reporter

SchemaOf = Annotated[
    str, Flag("File format: layout or recipe.", metavar="layout|recipe", argument=True, values=("layout", "recipe"))
]


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """Options of the ``schema`` command."""

    of: SchemaOf = "layout"


def schema(options: SchemaOptions, reporter: Reporter) -> None:
    """Print the JSON Schema of layout or recipe files, for editors that complete and check YAML."""
    from spkv_nas.base.console import out
    from spkv_nas.stages.schema import stage

    out.write(json.dumps(stage.schema(options), indent=2) + "\n")
