"""Commands as functions, continued from ``stages``: what attention costs, and the calibration of its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_atomic
from spkv_nas.base.units import parse_context
from spkv_nas.base.workspace import Workspace
from spkv_nas.cost.calibration import Calibration, LayerCase, default_contexts
from spkv_nas.cost.formulas import Cost, attention_flops, cost, flops_per_token, layout_density
from spkv_nas.cost.ladder import find_level, ladder
from spkv_nas.cost.roofline import Roofline, find_hardware
from spkv_nas.cost.times import AttentionTimes, Phase
from spkv_nas.stages.all import PAPER, Announce, _bar, _device, _silent


def calibrate_stage(
    workspace: Workspace,
    preset: str | None = None,
    *,
    model: str | None = None,
    context: str = "32k",
    batch: int = 1,
    window: int = 128,
    dtype: str | None = None,
    device: str | None = None,
    name: str | None = None,
) -> tuple[str, Calibration]:
    """Measure the attention of a level or model on this machine; written to ``reports/<name>/``.

    Returns:
        The name and the calibration.
    """
    from spkv_nas.cost.timing import time_attention

    own, _, shape = _find_shape(preset, model)
    device = _device(device)
    contexts = default_contexts(parse_context(context))
    case = LayerCase(
        shape.num_heads, shape.num_kv_heads, shape.head_dim,
        dtype or ("float32" if device == "cpu" else "bfloat16"), window, batch, device,
    )  # fmt: skip
    workspace.check_writable()
    with _bar("measuring") as progress:
        calibration = time_attention(case, contexts, progress=progress)
    calibration.write(workspace.report_dir(name or own))
    return name or own, calibration


def cost_stage(
    workspace: Workspace,
    preset: str | None = None,
    *,
    model: str | None = None,
    layouts: list[Path] | None = None,
    density: float | None = None,
    context: str = "128k",
    window: int = 128,
    element_size: int = 2,
    calibration: str | None = None,
    hardware: str | None = None,
    announce: Announce = _silent,
) -> tuple[str, Shape, int, list[Cost], AttentionTimes]:
    """Cost of full attention, of each layout, and at a density, for a level of the ladder or a model.

    Times come from the calibration of that name; else, unless ``hardware`` is given, from the one of the level's or
    model's own name if there is one that fits (``announce`` says why one does not); else from the roofline.

    Returns:
        Name of the model, its shape, the context in tokens, the costs in that order, and what gave their times.
    """
    own, name, shape = _find_shape(preset, model)
    tokens = parse_context(context)
    read = [Layout.read(path) for path in layouts or []]
    shares = [layout_density(shape, layout) for layout in read]
    windows = [layout.window for layout in read] + ([window] if density is not None else [])
    times = find_times(
        workspace, own, shape, windows, tokens,
        calibration=calibration, hardware=hardware, element_size=element_size, announce=announce,
    )  # fmt: skip
    rows = [_timed(cost("full attention", shape, tokens, element_size=element_size), shape, tokens, times)]
    for layout, share in zip(read, shares, strict=True):
        title = f"{layout.strategy}, {layout.num_global} of {layout.num_heads} heads"
        row = cost(title, shape, tokens, density=share, window=layout.window, element_size=element_size)
        rows.append(_timed(row, shape, tokens, times, layout))
    if density is not None:
        title = f"SP-KV, density {density:g}"
        row = cost(title, shape, tokens, density=density, window=window, element_size=element_size)
        rows.append(_timed(row, shape, tokens, times, window=window))
    return name, shape, tokens, rows, times


def _timed(
    row: Cost, shape: Shape, context: int, times: AttentionTimes, layout: Layout | None = None, *, window: int = 0
) -> Cost:
    """``row`` with the times of the layout, or else of its density in every layer."""

    def seconds(phase: Phase) -> float | None:
        if not times.covers(context, phase):
            return None
        if layout is not None:
            return times.layout_seconds(layout, context, phase)
        return shape.num_layers * times.layer_seconds(context, density=row.density, window=window, phase=phase)

    return replace(row, decode_seconds=seconds("decode"), prefill_seconds=seconds("prefill"))


def _find_shape(preset: str | None, model: str | None) -> tuple[str, str, Shape]:
    """Name of the results, name to print, and shape of a level, of a model, or of the embedded reference."""
    if preset is not None and model is not None:
        raise UserError("give a level of the ladder or --model, not both")
    if preset is not None:
        return preset, preset, find_level(preset).shape
    from spkv_nas.model.checkpoint import read_shape

    source = model or "embedded:reference"
    shape = read_shape(source)
    if source.startswith("embedded:"):
        return EMBEDDED.name, source, shape
    place = Path(source).resolve()
    return (place.parent if place.suffix == ".json" else place).name, source, shape


def find_times(
    workspace: Workspace,
    name: str,
    shape: Shape,
    windows: Sequence[int],
    context: int,
    *,
    calibration: str | None = None,
    hardware: str | None = None,
    element_size: int = 2,
    announce: Announce = _silent,
) -> AttentionTimes:
    """Times of attention: of a calibration, by default that of the results ``name`` if it fits, or the roofline.

    Raises:
        UserError: the ``calibration`` asked for is not there or does not fit, or the ``hardware`` is unknown.
    """
    if calibration is not None and hardware is not None:
        raise UserError("give --calibration or --hardware, not both")
    if hardware is None and (calibration is not None or (workspace.report_dir(name) / "calibration.yaml").is_file()):
        try:
            return _find_calibration(workspace, calibration or name, shape, windows, context)
        except UserError as error:
            if calibration is not None:
                raise
            announce(f"{error}\nso times are the roofline's")
    return Roofline(find_hardware(hardware or "h200"), shape, element_size)


def _find_calibration(
    workspace: Workspace, name: str, shape: Shape, windows: Sequence[int], context: int
) -> Calibration:
    """The workspace's calibration ``name``. Raises ``UserError`` if there is none, or it does not fit."""
    folder = workspace.report_dir(name)
    if not (folder / "calibration.yaml").is_file():
        raise UserError(f"no calibration '{name}' in {folder.parent}: run spkv-nas calibrate first")
    found = Calibration.read(folder)
    found.check_shape(shape)
    for window in windows:
        found.check_window(window)
    found.check_context(context, "decode")
    return found


def flops_figure_stage(workspace: Workspace, context: str, density: float, *, name: str = PAPER) -> Path:
    """FLOPs of the paper's ladder against model size, dense and at a density; the picture in ``reports/<name>/``."""
    from spkv_nas.report.cost_charts import flops_charts
    from spkv_nas.report.plot import save_chart

    tokens = parse_context(context)
    shapes = {level.name: level.shape for level in ladder().values() if not level.name.startswith("micro")}
    rows = pd.DataFrame(
        {
            "name": level,
            "num_parameters": shape.num_parameters,
            "attention_dense": attention_flops(shape, tokens),
            "attention_sparse": attention_flops(shape, tokens, density=density),
            "total_dense": flops_per_token(shape, tokens),
            "total_sparse": flops_per_token(shape, tokens, density=density),
        }
        for level, shape in shapes.items()
    ).sort_values("num_parameters")
    workspace.check_writable()
    folder = workspace.report_dir(name)
    write_atomic(folder / "flops.csv", rows.to_csv(index=False, float_format="%.6g"))
    save_chart(folder, flops_charts(rows, tokens, density))
    return folder / "flops.png"
