"""Print the scaling law."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path

if TYPE_CHECKING:
    from spkv_nas.stages.reproduce.scaling.stage import ScalingResult


def scaling(result: ScalingResult) -> None:
    """Print the fitted scaling laws and their predictions."""
    for law in result.laws:
        _law(result.name, law)
    print_path("scaling", result.figure or result.folder / "scaling.yaml")


def _law(name: str, law: dict[str, Any]) -> None:
    """Print one scaling law: parameters, fit, and predictions of the last and the held-out runs."""
    # Fitted parameters
    title = f"{name}, {law['variant']}" if law["variant"] else name
    grid = Table("", "value", f"{law['confidence']:.0%} interval", title=escape(f"{title}: {law['law']}"))
    for parameter, (value, low, high) in law["parameters"].items():
        grid.add_row(parameter, f"{value:.4g}", f"{low:.4g} .. {high:.4g}")
    out.print(grid)
    out.print(
        f"R² {law['r_squared']:.5f} over {law['num_runs']} runs; residual standard deviation {law['residual']:.4f}"
    )
    # Prediction of the last run from the others
    last = law["leave_last_out"]
    if last["predicted"] is not None:
        out.print(
            f"last run from the others: {escape(last['name'])} predicted {last['predicted']:.4f}, "
            f"measured {last['nll']:.4f} ({last['error_percent']:+.2f} %)"
        )
    # Predictions of held-out runs
    for run in law["runs"]:
        if run["held_out"]:
            out.print(
                f"held out: {escape(run['name'])} predicted {run['predicted']:.4f} ({run['low']:.4f} .. "
                f"{run['high']:.4f}), measured {run['nll']:.4f} ({run['error_percent']:+.2f} %)"
            )
