"""Render self-contained HTML files from the templates in this folder.

The template engine escapes everything that comes from users; scripts and styles are allowed by their hashes only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from spkv_nas.report.formatting import capitalized
from spkv_nas.report.page_svg import draw_chart, draw_scale


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template with the given values."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        csp_hash=_csp_hash, compact=compact, cap=capitalized, tie=_tie, draw=draw_chart, draw_scale=draw_scale
    )
    return environment.get_template(template).render(**values)


def compact(text: str) -> str:
    """Strip comments and indentation from a script or style, whose own strings contain neither."""
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def _tie(sentence: str) -> str:
    """Replace the spaces before percent signs and around ± and = by no-break spaces."""
    for sign in (" %", " ± ", " = "):
        sentence = sentence.replace(sign, sign.replace(" ", "\N{NO-BREAK SPACE}"))
    return sentence


def _csp_hash(content: str) -> str:
    """Return the Content-Security-Policy source that allows an inline style or script with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
