"""Run the ``schema`` command; its docstring is the help."""

from __future__ import annotations

import json

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.schema.options import SchemaOptions


def schema(options: SchemaOptions, reporter: Reporter) -> None:
    """Print the JSON Schema of layout or recipe files, for editors that complete and check YAML."""
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.base.console import out
    from spkv_nas.base.errors import UserError
    from spkv_nas.training.recipe import Recipe

    schemas = {"layout": Layout.json_schema, "recipe": Recipe.model_json_schema}
    if options.of not in schemas:
        raise UserError(f"no schema for '{options.of}'; expected {' or '.join(schemas)}")
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schemas[options.of]()}
    out.write(json.dumps(document, indent=2) + "\n")
