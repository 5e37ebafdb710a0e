"""Convert a layout to another format."""

from __future__ import annotations

from spkv_nas.proposal import convert as forms
from spkv_nas.stages.layout.convert.options import ConvertOptions


def convert(options: ConvertOptions) -> list[str]:
    """Convert a layout or head scores to another format; return sentences on what was written and what was lost."""
    return forms.convert(
        options.source,
        options.target,
        budget=options.budget,
        sparsity=options.sparsity,
        threshold=options.threshold,
        window=options.window,
        sinks=options.sinks,
    )
