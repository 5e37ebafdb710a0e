"""Run the ``schema`` command; its docstring is the help."""

from __future__ import annotations

import json

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.schema.options import SchemaOptions


def schema(options: SchemaOptions, reporter: Reporter) -> None:
    """Print the JSON Schema of layout or recipe files, for editors that complete and check YAML."""
    from spkv_nas.base.console import out
    from spkv_nas.stages.schema import stage

    out.write(json.dumps(stage.schema(options), indent=2) + "\n")
