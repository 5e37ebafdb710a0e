"""Declare the options of the ``schema`` command, and run it; its docstring is the help."""

import json
from dataclasses import dataclass
from typing import Annotated

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import console, errors, progress
from spkv_nas.base.flag import Flag

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """Options of the ``schema`` command."""

    of: Annotated[
        str,
        Flag(
            "File format: layout or recipe.",
            metavar="layout|recipe",
            argument=True,
            values=("layout", "recipe"),
        ),
    ] = "layout"


def schema(options: SchemaOptions, reporter: progress.Reporter) -> None:
    """Print the JSON Schema of layout or recipe files, for editors that complete and check YAML."""
    from spkv_nas.training.recipe import Recipe

    schemas = {"layout": Layout.json_schema, "recipe": Recipe.model_json_schema}
    if options.of not in schemas:
        raise errors.UserError(f"no schema for '{options.of}'; expected {' or '.join(schemas)}")
    content = schemas[options.of]()
    document = {"$schema": _DRAFT, **content}
    console.out.write(json.dumps(document, indent=2) + "\n")
