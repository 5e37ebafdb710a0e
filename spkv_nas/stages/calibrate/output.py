"""Print measured attention times, and convert them to a JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.base.units import format_microseconds

if TYPE_CHECKING:
    from spkv_nas.stages.calibrate.stage import CalibrationResult


def calibration(result: CalibrationResult) -> None:
    """Print measured times by number of global heads."""
    measured = result.calibration
    case = measured.case
    counts = case.global_counts
    grid = Table(
        "",
        "tokens",
        *(str(count) for count in counts),
        title=f"{escape(result.name)}: µs per token and layer\nby number of global heads",
    )
    seconds = {(row.phase, row.context, row.num_global): row.seconds_per_token for row in measured.timings}
    for phase, context in dict.fromkeys((row.phase, row.context) for row in measured.timings):
        grid.add_row(phase, f"{context:,}", *(format_microseconds(seconds[phase, context, count]) for count in counts))
    out.print(grid)
    out.print(f"{case.title}, window {case.window}, {escape(measured.source)}")
    if (last := measured.contexts("prefill")[-1]) < measured.contexts("decode")[-1]:
        out.print(f"prefill: not measured beyond {last:,} tokens, where one call would take too long")
    print_path("times", result.folder / "calibration.csv")


def document(result: CalibrationResult) -> dict[str, Any]:
    """Return the measured times by number of global heads."""
    measured = result.calibration
    return {
        "name": result.name,
        "case": measured.case,
        "source": measured.source,
        "times": measured.timings,
        "folder": result.folder,
    }
