"""Generate the reference pages from the code: commands and options, recipe keys, and the columns of result files."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from spkv_nas.cli.app import app
from spkv_nas.training.recipe import Recipe

# Options of every command, described once
_COMMON = {"workspace", "device", "quiet", "verbose", "debug", "json", "help"}


def write_reference(folder: Path) -> None:
    """Write ``cli.md`` and ``recipe.md`` into ``folder``; unchanged files are left alone."""
    folder.mkdir(exist_ok=True)
    for name, text in (("cli.md", "\n".join(_cli())), ("recipe.md", "\n".join(_recipe()))):
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def _cli() -> Iterator[str]:
    """Yield the lines of the command reference: one section per command, its options as a table."""
    yield "# Commands\n"
    yield (
        "Every command also takes `--json` (print the result as one JSON document; not `generate` and `schema`), `-q` "
        "(print only results, warnings and errors), `-v` (also show details and library logs), `--debug` (show the "
        "traceback of an error), those that use a workspace take `--workspace FOLDER` (by default the current folder), "
        "and those that compute take `--device cpu|cuda` (by default cuda if available), or `--device auto` to shard a "
        "model that is measured over all GPUs; all but `--json` may stand before the command's name. Results go to "
        "standard output, everything else to standard error.\n"
    )
    for name, command in _commands(typer.main.get_command(app), "spkv-nas"):
        yield f"## {name}\n"
        yield f"{_paragraphs(command.help)}\n"
        shown = [
            parameter
            for parameter in command.params
            if parameter.name not in _COMMON and not parameter.hidden
        ]
        if shown:
            yield "| argument or option | meaning | default |\n|---|---|---|"
            yield from (_option_row(parameter) for parameter in shown)
            yield ""


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (full name, command) of every command below ``group``, subcommands in place of their groups."""
    context = typer.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _option_row(parameter: Any) -> str:
    """Return the table row of one argument or option."""
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    names = names if parameter.param_type_name == "option" else f"`{parameter.name.upper()}`"
    default = (
        parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    )
    default = "" if default in (None, False, (), []) or callable(default) else str(default)
    return f"| {names} | {_cell(parameter.help or '')} | {_cell(default)} |"


def _recipe() -> Iterator[str]:
    """Yield the lines of the recipe reference: one table per section of the recipe."""
    yield "# Recipe keys\n"
    yield (
        "A recipe is a YAML file, parsed strictly: an unknown key, a wrong type or a value out of range is an error. "
        "`spkv-nas schema recipe` prints the JSON Schema for editors, and `spkv-nas init` writes a first recipe for a "
        "model and a text.\n"
    )
    yield from _section("", Recipe)


def _section(path: str, model: type[BaseModel]) -> Iterator[str]:
    """Yield one section's table, then those of the sections inside it."""
    yield f"## {f'`{path}`' if path else 'Top level'}\n"
    yield f"{_paragraphs(model.__doc__)}\n"
    yield "| key | meaning | type | default |\n|---|---|---|---|"
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        cells = (
            f"`{name}`",
            field.description or "",
            _type_name(field.annotation),
            _default(field),
        )
        yield f"| {' | '.join(map(_cell, cells))} |"
        inner += [(f"{path}.{name}" if path else name, part) for part in _models(field.annotation)]
    yield ""
    for inner_path, part in inner:
        yield from _section(inner_path, part)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a key's type contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def _type_name(annotation: Any) -> str:
    """Return a key's type as a reader of YAML would say it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in parts if part is not type(None))
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (list, tuple):
        return f"list of {_type_name(parts[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "`true` or `false`",
        dict: "mapping",
    }
    return names.get(origin or annotation, "any")


def _default(field: FieldInfo) -> str:
    """Return a key's default; sections that default to themselves and required keys have none."""
    value = field.default
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "required" if field.is_required() else ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "none" if value is None else f"`{value}`"


def _paragraphs(text: str | None) -> str:
    """Return a docstring with its indentation removed and code quoted as Markdown does."""
    lines = (text or "").strip().splitlines()
    return _quoted("\n".join(line.strip() for line in lines).replace("``", "`").replace("\f", ""))


def _cell(text: str) -> str:
    """Return text that fits into a table's cell."""
    return _quoted(text.replace("|", "\\|").replace("\n", " "))


def _quoted(text: str) -> str:
    """Return text whose options outside of code are code, so that they do not break at a hyphen."""
    parts = text.split("`")  # the parts at even positions are outside of code
    parts[::2] = [re.sub(r"(?<![\w-])--[a-z][a-z-]*[a-z]", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)
