"""Time attention on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spkv_nas.base.device import choose_device
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.units import parse_context
from spkv_nas.cost.calibration import Calibration, LayerCase, default_contexts
from spkv_nas.stages.calibrate.options import CalibrateOptions
from spkv_nas.stages.sized_model import SizedModel


@dataclass(frozen=True)
class CalibrationResult:
    """Calibration, with the name and folder that it was written to."""

    name: str
    calibration: Calibration
    folder: Path


def calibrate(options: CalibrateOptions, reporter: Reporter = SILENT) -> CalibrationResult:
    """Time the attention of a level or model on this machine and write ``reports/<name>/``."""
    from spkv_nas.cost.timing import time_attention

    # Describe an attention layer of the model
    subject = SizedModel.of(options.level, options.model)
    shape, device = subject.shape, choose_device(options.device)
    contexts = default_contexts(parse_context(options.context))
    case = LayerCase(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        options.dtype or ("float32" if device == "cpu" else "bfloat16"),
        options.window,
        options.batch,
        device,
    )
    # Time it
    options.folders.check_writable()
    name = options.name or subject.name
    folder = options.folders.report_dir(name)
    with reporter.bar("measuring") as progress:
        calibration = time_attention(case, contexts, progress=progress)
    calibration.write(folder)
    return CalibrationResult(name, calibration, folder)
