"""Time attention on this machine."""

from functools import partial
from pathlib import Path
from typing import Any

from spkv_nas.base import console, progress, units
from spkv_nas.base.device import choose_device
from spkv_nas.base.errors import UserError
from spkv_nas.cost.calibration import Calibration, LayerCase, default_contexts, heads_title
from spkv_nas.cost.timing import time_attention
from spkv_nas.stages import commands, sized_model
from spkv_nas.stages.options.calibrate import CalibrateOptions


def run(options: CalibrateOptions, reporter: progress.Reporter) -> commands.Result:
    """Time the attention of a level or model on this machine and write ``reports/<name>/``."""
    # Describe an attention layer of the model
    subject = sized_model.SizedModel.of(options.level, options.model)
    shape = subject.shape
    device = choose_device(options.device)
    if shape.expanded_dim:
        raise UserError(
            f"{subject.name} has latent attention, which is not timed: "
            "plan attention without --times"
        )
    contexts = default_contexts(units.parse_context(options.context))
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    case = LayerCase(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        dtype,
        options.window,
        options.batch,
        device,
    )
    # Time it
    name = options.name or subject.name
    folder = options.folders.report_dir(name)
    with reporter.bar("measuring") as bar:
        calibration = time_attention(case, contexts, progress=bar)
    calibration.write(folder)
    return commands.Result(
        calibration, partial(show, name, folder), partial(document, name, folder)
    )


def show(name: str, folder: Path, measured: Calibration) -> None:
    """Print measured times by number of global heads, and the folder that they were written to."""
    case = measured.case
    _, counts, seconds = measured.grid
    # Tabulate the times by context
    title = f"{console.escape(name)}: µs per decoded token and layer\nby number of global heads"
    grid = console.Table("tokens", *(f"{count:.0f}" for count in counts), title=title)
    for context, row in zip(measured.contexts, seconds, strict=True):
        grid.add_row(f"{context:,}", *map(units.format_microseconds, row))
    console.out.print(grid)
    console.out.print(
        f"{heads_title(case)}, window {case.window}, {console.escape(measured.source)}"
    )
    console.print_path("times", folder / "calibration.csv")


def document(name: str, folder: Path, measured: Calibration) -> dict[str, Any]:
    """Return the measured times by number of global heads."""
    return {
        "name": name,
        "case": measured.case,
        "source": measured.source,
        "times": [row._asdict() for row in measured.timings],
        "folder": folder,
    }
