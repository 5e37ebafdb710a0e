"""Train the rows of an ablations file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.contrib.reproduce.ablate import ablation
from spkv_nas.contrib.reproduce.ablate.options import EMBEDDED_FILE, AblateOptions
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.printing import change


@dataclass(frozen=True)
class AblationResult:
    """Name of the ablations file, the table of ``ablation``, and its folder."""

    name: str
    rows: pd.DataFrame
    folder: Path


def ablate(options: AblateOptions, reporter: Reporter = SILENT) -> AblationResult:
    """Train the rows of an ablations file, by default the embedded one, and write a table to ``reports/<name>/``."""
    quiet_transformers(reporter)
    file, workspace = options.file or EMBEDDED_FILE, options.folders
    name, rows = ablation.ablate(file, workspace, device=options.device, dtype=options.dtype, reporter=reporter)
    return AblationResult(name, rows, workspace.report_dir(name))


def ablations(result: AblationResult) -> None:
    """Print density and NLL of each row, and their change from the first."""
    title = f"{escape(result.name)}: Δ relative to the first row"
    grid = Table("", "density %", "Δ density %", "NLL", "ΔNLL %", title=title)
    for row in result.rows.itertuples():
        nll_change = change(row.delta_nll_percent, row.delta_nll_standard_error) if row.Index else "-"
        density_change = f"{row.delta_density_percent:+.1f}" if row.Index else "-"
        grid.add_row(escape(row.name), f"{row.density_percent:.1f}", density_change, f"{row.nll:.4f}", nll_change)
    out.print(grid)
    print_path("table", result.folder / "ablations.csv")
