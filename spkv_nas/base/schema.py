"""Strict validation of files with pydantic; errors name the key, what was expected and what was found."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from spkv_nas.base.errors import UserError, shortened

_MAX_SHOWN = 160  # characters of an invalid value


class Recorded(BaseModel):
    """Base of the schemas of records: the keys that commands read back, strictly typed, beside any others."""

    model_config = ConfigDict(strict=True, frozen=True)


class Section(Recorded):
    """Base of all other schemas: immutable, strictly typed, without unknown keys, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


Schema = TypeVar("Schema", bound=BaseModel)


def merged(base: Any, overrides: Mapping[str, Any]) -> Any:
    """Return ``base`` updated with the keys of ``overrides``, recursively."""
    if not isinstance(base, Mapping):
        return dict(overrides)
    result = dict(base)
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            value = merged(result.get(key), value)
        result[key] = value
    return result


def validate(schema: type[Schema], data: dict[str, Any], where: str) -> Schema:
    """Validate the content ``data`` of a file as an object of class ``schema``; ``where`` names the file in errors.

    Raises ``UserError``: a value is invalid; names the key, what was expected and what was found, and suggests the
    nearest known key for an unknown one.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        lines = [_explain(schema, dict(problem)) for problem in error.errors()[:3]]
        raise UserError("\n".join(f"{where}: {line}" for line in lines)) from error


def _explain(schema: type[BaseModel], problem: dict[str, Any]) -> str:
    """Describe a pydantic error: the key, what was expected and what was found."""
    location = problem["loc"]
    key = shortened(".".join(str(part) for part in location), _MAX_SHOWN)
    if problem["type"] == "missing":
        return f"key '{key}' is missing"
    if problem["type"] == "extra_forbidden":
        known_keys = _known_keys(schema, location[:-1])
        return f"unknown key '{key}'; {suggestion(str(location[-1]), known_keys)}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    found = shortened(repr(problem["input"]), _MAX_SHOWN)
    return f"key '{key}': {message}; found {found}"


def suggestion(key: str, names: Sequence[str]) -> str:
    """Suggest the nearest of the names, or list them all if none is similar."""
    matches = difflib.get_close_matches(key, names, n=1)
    if matches:
        return f"did you mean '{matches[0]}'?"
    return f"known keys: {', '.join(names)}"


def _known_keys(schema: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Return the keys of the (sub-)schema at ``location``; empty if the path leads through a list."""
    current: Any = schema
    for part in location:
        field = getattr(current, "model_fields", {}).get(part)
        kind = field.annotation if field else None
        current = next((part for part in get_args(kind) if hasattr(part, "model_fields")), kind)
    fields = getattr(current, "model_fields", {})
    return sorted(field.alias or name for name, field in fields.items())
