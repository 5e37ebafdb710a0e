"""Parse and format sizes: bytes such as ``2GiB``, context lengths such as ``128k``, times; bytes per dtype."""

import math
import re

from spkv_nas.base.errors import UserError

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
_POWERS = ("", "k", "M", "G", "T", "P", "E", "Z")  # prefixes of powers of 1,000
MAX_CONTEXT = 2**40  # tokens
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}


def parse_bytes(text: str) -> int:
    """Parse a size in bytes, such as ``2GiB``, ``1.5 GB`` or ``2000000000``; raise ``UserError`` for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", text.lower())
    number = float(match[1]) * _UNITS.get(match[2], 0) if match else 0.0
    if not 1 <= number < 2**63:
        raise UserError(
            f"'{text}' is not a size in bytes; use for example 2GiB, 800MB or 2000000000"
        )
    return int(number)


def format_bytes(number: int) -> str:
    """Format bytes, such as "1.98 GiB"."""
    value = float(number)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value /= 1024
        unit = larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


def format_flops(number: float) -> str:
    """Format FLOPs, such as "1.3 PFLOP"."""
    power = 0
    if number > 0:
        power = min(len(_POWERS) - 1, max(0, math.floor(math.log10(number) / 3)))
    return f"{number / 1000**power:.3g} {_POWERS[power]}FLOP"


def format_seconds(seconds: float) -> str:
    """Format a duration, such as "45 s", "12 min", "3 h 20 min" or "5 days"."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(1, round(seconds))} s" if seconds else "0 s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{round(minutes / 1440):,} days"


def parse_length(text: str) -> float | int:
    """Parse a number of steps, as an int, or a duration such as ``90s`` or ``1.5h``, in seconds as a float."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smh]?)", text.strip().lower())
    number, unit = match.groups() if match else ("0", "")
    is_fraction_of_step = not unit and "." in number
    if float(number) == 0 or is_fraction_of_step:
        raise UserError(
            f"'{text[:40]}' is neither a duration, such as 90s, 30m or 2h, nor a number of steps"
        )
    if not unit:
        return int(number)
    return float(number) * _SECONDS[unit]


def parse_context(text: str) -> int:
    """Parse a number of tokens: ``131072`` or ``128k`` (k: 1,024); ``UserError`` for other text, or out of range."""
    digits = text.strip().lower()
    factor = 1024 if digits.endswith("k") else 1
    try:
        tokens = factor * int(digits.removesuffix("k"))
    except ValueError as error:
        raise UserError(
            f"context '{text}' is not a number of tokens; use for example 131072 or 128k"
        ) from error
    if tokens < 1:
        raise UserError(f"a context must have at least 1 token; found {tokens}")
    if tokens > MAX_CONTEXT:
        raise UserError(
            f"context '{text}' is more than {MAX_CONTEXT:,} tokens; give for example 131072 or 128k"
        )
    return tokens


def format_microseconds(seconds: float | None) -> str:
    """Format seconds as microseconds; a dash for None."""
    if seconds is None:
        return "-"
    value = 1e6 * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
