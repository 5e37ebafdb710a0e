"""Name the methods and protocols of ``baselines``, and parse its options. Imports nothing heavy, for ``--help``."""

import math
from collections.abc import Callable
from typing import TypeVar

from spkv_nas.base.errors import UserError

STREAMING, RANDOM, KVZAP, H2O, EXPECTED = "streaming", "random", "kvzap", "h2o", "expected-attention"
METHODS = (STREAMING, RANDOM, KVZAP, H2O, EXPECTED)

EXACT, KVPRESS = "exact", "kvpress"
PROTOCOLS = (EXACT, KVPRESS)

Value = TypeVar("Value")


def parse_methods(text: str | None) -> list[str]:
    """Parse comma-separated methods, in the order of ``METHODS``; None selects all. Raises ``UserError``."""
    if text is None:
        return list(METHODS)
    names = _listed(text, str)
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise UserError(f"unknown method '{unknown[0]}' in --methods; choose from {', '.join(METHODS)}")
    return [name for name in METHODS if name in names]


def parse_densities(text: str) -> list[float]:
    """Parse comma-separated shares of keys in (0, 1], such as ``20%,0.15``, highest first. Raises ``UserError``."""
    return sorted(_listed(text, _density), reverse=True)


def parse_sinks(text: str) -> list[int]:
    """Parse comma-separated numbers of sink tokens, such as ``0,4``, ascending. Raises ``UserError``."""
    return sorted(_listed(text, _sinks))


def _listed(text: str, parse: Callable[[str], Value]) -> list[Value]:
    """Return the parsed values of a comma-separated list, without duplicates."""
    return list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def _density(text: str) -> float:
    """Parse one density, in percent or as a fraction."""
    try:
        density = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        density = math.nan
    if not 0.0 < density <= 1.0:
        raise UserError(f"--density must lie in (0, 1]; found '{text}'; give for example 20% or 0.2")
    return density


def _sinks(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise UserError(f"--sinks must be whole numbers of tokens; found '{text}'; give for example 0,4")
    return int(text)
