"""Format numbers, changes and names for the report."""

import math
import re
from collections.abc import Sequence
from pathlib import PurePath

from spkv_nas.artifacts.comparison import DENSE, FULL_ATTENTION
from spkv_nas.base.statistics import share_interval, share_text

BASELINES = {DENSE: "the dense model as it is", FULL_ATTENTION: "the control"}
DELTA_AXES = {DENSE: "ΔNLL from dense, %", FULL_ATTENTION: "ΔNLL from the control, %"}


def signed(value: float, digits: int = 3) -> str:
    """Format a number with its sign, a true minus; NaN is an em dash."""
    return "—" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def with_minus(text: str) -> str:
    """Return text in which numbers below 0 have a true minus."""
    return re.sub(r"(?<![\w.-])-(?=\d)", "\N{MINUS SIGN}", text)


def number(value: float, digits: int) -> str:
    """Format a number; NaN is an em dash."""
    return "—" if math.isnan(value) else f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def change(percent: float, error: float) -> str:
    """Format a change in percent with its standard error; NaN, as for a single document, is an em dash."""
    return "—" if math.isnan(percent) else f"{signed(percent)} ± {number(error, 3)}"


def measured(value: float, error: float) -> str:
    """Format a value with its standard error, such as "0.842 ± 0.036"; shares of 0 or 1 as ``share_text`` does."""
    if share_interval(value, error) is not None:
        return share_text(value, error)
    return f"{number(value, 3)} ± {number(error, 3)}"


def without_folder(text: str) -> str:
    """Return the last part of an absolute path; a page that is shown elsewhere should not hold a machine's folders."""
    path = PurePath(text)
    return path.name if path.is_absolute() and len(path.parts) > 2 else text


def listed(names: Sequence[str], max_names: int) -> str:
    """Join names with commas; beyond ``max_names`` of them, give only the number of the others."""
    num_more = len(names) - max_names
    return ", ".join([*names[:max_names], *([f"and {num_more} more"] if num_more > 0 else [])])


def capitalized(text: str) -> str:
    """Return text with its first letter as a capital; the others are kept."""
    return text[:1].upper() + text[1:]


def short(text: str, length: int) -> str:
    """Truncate text to one line of at most ``length`` characters, with unprintable characters replaced."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return printable if len(printable) <= length else printable[: length - 1].rstrip() + "…"
