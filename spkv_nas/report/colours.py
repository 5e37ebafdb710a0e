"""Define the colours of pictures: tones on white, and cividis, which is safe for colour blindness and greyscale."""

from __future__ import annotations

from typing import Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex

from spkv_nas.report.chart import Tone

TONES: dict[Tone | Literal["line"], str] = {  # the page has variables of these names, for light and dark mode
    "accent": "#1f5fa8",
    "muted": "#566173",
    "second": "#b05a00",
    "third": "#2e7d4f",
    "ink": "#1b2330",
    "line": "#dde1e8",  # of a grid
}
CHOSEN = "#d6006c"
SHADES = 65


def cividis(value: float) -> tuple[str, str]:
    """Return the colour of ``value``, clipped to [0, 1], and black or white for text on it (WCAG contrast)."""
    rgb = np.array(colormaps["cividis"](min(1.0, max(0.0, float(value))))[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    return to_hex(rgb.tolist()), "#000" if luminance > 0.179 else "#fff"
