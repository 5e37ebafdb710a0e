"""Return the JSON Schema of a kind of file."""

from __future__ import annotations

from typing import Any

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.stages.schema.options import SchemaOptions
from spkv_nas.training.recipe import Recipe


def schema(options: SchemaOptions) -> dict[str, Any]:
    """Return the JSON Schema of layout or recipe files. Raises ``UserError`` for another kind."""
    schemas = {"layout": Layout.json_schema, "recipe": Recipe.model_json_schema}
    if options.of not in schemas:
        raise UserError(f"no schema for '{options.of}'; expected {' or '.join(schemas)}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schemas[options.of]()}
