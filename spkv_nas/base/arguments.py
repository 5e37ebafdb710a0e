"""Convert an argument to the type of its parameter, or say in one line what it must be.

Python users have NumPy's integers, floats that are whole numbers, and 0-dimensional arrays: what means the same number
is converted. What does not, such as a string of digits or a bool for a number, is refused.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from spkv_nas.base.errors import UserError, shortened

Converters = Mapping[str, Callable[[Any], object]]  # by the name of a class
_UNFIT = object()  # returned for a value that is not of a kind
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "a string",
    NoneType: "None",
}


def convert(
    what: str,
    kind: object,
    value: object,
    converters: Converters | None = None,
    remedy: str = "",
) -> Any:
    """Return ``value`` as ``kind``, an annotation such as ``int | None`` or ``Sequence[Layout]``.

    ``kind`` is a class, union, literal, or container of these. ``converters``, by class name, make an instance from
    other objects, or return them unchanged. Raises ``UserError``, with a ``remedy``, if the value is of another kind.
    """
    kinds = _kinds(kind)
    converters = converters or {}
    # Try every kind unconverted first: a value of one of the kinds is not converted to another
    for option in kinds:
        result = _as(what, option, value, converters, remedy)
        if result is not _UNFIT:
            return result
    for option in kinds:
        name = getattr(option, "__name__", "")
        if name in converters:
            result = _as(what, option, converters[name](value), converters, remedy)
            if result is not _UNFIT:
                return result
    # Describe the expected kind and the value in an error
    expected = " or ".join(dict.fromkeys(_word(option) for option in kinds))
    is_short = isinstance(value, Real | str | NoneType)
    description = shortened(repr(value), 80) if is_short else _article(type(value).__name__)
    message = f"{what} must be {expected}; found {description}"
    raise UserError(f"{message}: {remedy}" if remedy else message)


def _kinds(kind: object) -> tuple[object, ...]:
    """Return the members of a union, or a single kind."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _as(what: str, kind: object, value: object, converters: Converters, remedy: str) -> object:
    """Return ``value`` as one kind, or ``_UNFIT``."""
    origin: Any = get_origin(kind) or kind
    # Compare kinds that are not classes by rules of their own
    if origin is Any:
        return value
    if origin is Literal:
        return value if _is_one_of(value, get_args(kind)) else _UNFIT
    if origin in (int, float, bool):
        return _number(origin, value)
    if origin is Callable or getattr(origin, "_is_protocol", False):
        return value if callable(value) else _UNFIT
    # Check the class, then convert the items of a container
    if not isinstance(value, origin):
        return _UNFIT
    if origin is Sequence:
        return _items(what, kind, value, converters, remedy)
    if origin is Mapping:
        _, item = get_args(kind)
        return {
            key: convert(f"{what}[{key!r}]", item, element, converters, remedy)
            for key, element in value.items()
        }
    return value


def _is_one_of(value: object, literals: Sequence[object]) -> bool:
    """Return whether a value is a literal, or a text that equals one."""
    if isinstance(value, str | bytes) and value in literals:
        return True
    return any(value is literal for literal in literals)


def _items(what: str, kind: Any, value: Sequence[Any], converters: Converters, remedy: str) -> Any:
    """Return the items of a sequence as those of its kind, or ``_UNFIT`` for text, which is a sequence in Python."""
    if isinstance(value, str | bytes):
        return _UNFIT
    (item,) = get_args(kind)
    return [
        convert(f"{what}[{index}]", item, element, converters, remedy)
        for index, element in enumerate(value)
    ]


def _number(kind: type, value: Any) -> Any:
    """Return a number as a Python int, float or bool, or ``_UNFIT``."""
    if getattr(value, "ndim", None) == 0:  # of NumPy or torch
        value = value.item()
    # Keep booleans apart from numbers, although Python's bool is an int
    if isinstance(value, bool):
        return value if kind is bool else _UNFIT
    if kind is bool or not isinstance(value, Real):
        return _UNFIT
    if kind is float:
        return float(value) if math.isfinite(value) else _UNFIT
    if isinstance(value, Integral):
        return value
    return int(float(value)) if float(value).is_integer() else _UNFIT


def _word(kind: object) -> str:
    """Return the words for a kind in an error."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    origin: Any = get_origin(kind) or kind
    if origin in (Sequence, Iterable, Mapping):
        items = " or ".join(_word(item) for item in _kinds(get_args(kind)[-1]))
        return f"a {origin.__name__.lower()}, each item {items}"
    if origin is PathLike:
        return "a path"
    other = "a function" if origin is Callable else _article(getattr(origin, "__name__", "value"))
    return _WORDS.get(origin, other)


def _article(name: str) -> str:
    """Return the name of a class with its article."""
    begins_with_vowel = name[0] in "AEIOU" or name == "ndarray"
    return f"an {name}" if begins_with_vowel else f"a {name}"
