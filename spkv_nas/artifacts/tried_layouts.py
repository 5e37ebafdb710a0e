"""Record the layouts that were compared on text before one was recommended, in the record of a probe.

A probe for a memory budget compares layouts of several kinds (``evaluation.contest``) and names the one to recommend;
``propose``, the report and the suggested commands read it from here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spkv_nas.artifacts.layout import Layout

TRIED = "layouts_tried"  # key of a record: a list of ``TriedLayout.as_mapping``
# Key of a record: the name of the layout to recommend; and the name of a copy of its file
RECOMMENDED = "recommended"
# Standard errors from a measured loss, beyond which a prediction is said to be wrong
FAR_ERRORS = 2.0


@dataclass(frozen=True)
class TriedLayout:
    """A layout with what was predicted of it and what was measured, in percent of full attention's NLL."""

    name: str
    layout: Layout
    predicted: float  # change of NLL by the head scores; NaN: they predict none
    change: float  # measured change of NLL without training
    standard_error: float  # of ``change``, paired by document; NaN for a single document
    blocks: int  # number of blocks that it was measured on

    @property
    def is_far_off(self) -> bool:
        """Return whether the prediction is further from what was measured than chance explains."""
        return abs(self.predicted - self.change) > FAR_ERRORS * self.standard_error

    def as_mapping(self) -> dict[str, object]:
        """Return the entries for a record, without numbers that are not known."""
        numbers = {
            "predicted": self.predicted,
            "change": self.change,
            "standard_error": self.standard_error,
        }
        return {
            "name": self.name,
            "heads": " ".join(self.layout.heads),
            "windows": dict(self.layout.legend),
            "sinks": self.layout.sinks,
            **{key: round(value, 6) for key, value in numbers.items() if not math.isnan(value)},
            "blocks": self.blocks,
        }

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> "TriedLayout":
        """Return the layout of an entry of a record."""
        letters = row["windows"]
        layout = Layout.from_windows(
            [[letters.get(letter) for letter in heads] for heads in row["heads"].split()],
            strategy=row["name"],
            sinks=row["sinks"],
        )
        return cls(
            name=row["name"],
            layout=layout,
            predicted=row.get("predicted", math.nan),
            change=row.get("change", math.nan),
            standard_error=row.get("standard_error", math.nan),
            blocks=row["blocks"],
        )
