"""Train the rows of an ablations file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.reproduce.ablate.options import EMBEDDED_FILE, AblateOptions
from spkv_nas.training import ablation


@dataclass(frozen=True)
class AblationResult:
    """Name of the ablations file, the table of ``training.ablation``, and its folder."""

    name: str
    rows: pd.DataFrame
    folder: Path


def ablate(options: AblateOptions, reporter: Reporter = SILENT) -> AblationResult:
    """Train the rows of an ablations file, by default the embedded one, and write a table to ``reports/<name>/``."""
    quiet_transformers(reporter)
    file, workspace = options.file or EMBEDDED_FILE, options.folders
    name, rows = ablation.ablate(file, workspace, device=options.device, dtype=options.dtype, reporter=reporter)
    return AblationResult(name, rows, workspace.report_dir(name))
