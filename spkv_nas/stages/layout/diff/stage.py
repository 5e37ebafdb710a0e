"""Compare two layouts of one model."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts.layout import Difference, Layout
from spkv_nas.stages.layout.diff.options import DiffOptions
from spkv_nas.stages.layout.reading import read_layout


@dataclass(frozen=True)
class ComparedLayouts:
    """Two layouts and the difference of their heads."""

    first: Layout
    second: Layout
    difference: Difference

    @property
    def is_same(self) -> bool:
        """Return whether both layouts give the same model."""
        return self.first.hash == self.second.hash


def diff(options: DiffOptions) -> ComparedLayouts:
    """Compare two layouts of one model head by head."""
    (first,), (second,) = (read_layout(file).layouts.values() for file in (options.a, options.b))
    return ComparedLayouts(first, second, Difference.of(first, second))
