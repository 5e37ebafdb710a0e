"""HTML files that load nothing, from the templates beside this file.

Everything that comes from users is escaped by the template engine; scripts and styles are allowed by their hash alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from spkv_nas.report.svg import draw, draw_scale, legend


def render(template: str, **given: Any) -> str:
    """The file that a template makes of what is given."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        csp_hash=_csp_hash, compact=compact, tie=_tie, draw=draw, draw_scale=draw_scale, legend=legend
    )
    return environment.get_template(template).render(**given)


def compact(text: str) -> str:
    """A script or style without comments and indentation, of which no text in it is made."""
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def _tie(sentence: str) -> str:
    """No line break before a percent sign nor around a plus-minus or an equals sign."""
    for sign in (" %", " ± ", " = "):
        sentence = sentence.replace(sign, sign.replace(" ", "\N{NO-BREAK SPACE}"))
    return sentence


def _csp_hash(content: str) -> str:
    """The Content-Security-Policy source that allows an inline style or script of exactly this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
