"""Compare how probes rank the heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.windows import warn_of_separators, warn_of_windows
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.proposal.agreement import agreement, parse_probe, write_agreement
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.report.budget_charts import agreement_charts
from spkv_nas.report.figures import save_figure
from spkv_nas.stages.compare.options import CompareOptions
from spkv_nas.stages.lookup import find_table


@dataclass(frozen=True)
class AgreementResult:
    """Agreement between probes.

    Attributes:
        rows: table of ``proposal.agreement``.
        folder: folder of the table.
        figure: path of the figure; None where the plotting library is not installed.
    """

    rows: pd.DataFrame
    folder: Path
    figure: Path | None


def compare(options: CompareOptions, reporter: Reporter = SILENT) -> AgreementResult:
    """Measure how far probes, or with ``split_by`` the parts of each probe, agree on the heads to choose.

    The table and its figure are written to ``reports/<name>/``.
    """
    # Read and split the probes
    tables: dict[str, HeadScores] = {}
    for probe in options.probes:
        for label, table in parse_probe(probe, lambda source: find_table(options.folders, source), options.split_by):
            if label in tables and tables[label].content_hash == table.content_hash:
                raise UserError(f"probe '{label}' is given twice")
            tables[label if label not in tables else probe] = table
    if len(tables) < 2:
        raise UserError(
            "compare needs at least two probes: give another, or split this one (--split-by domain or half)"
        )
    # Compare the heads that they choose
    first = next(iter(tables.values()))
    rows = agreement(tables, parse_budget(options.budget, first.num_candidates))
    folder = options.folders.report_dir(options.name or first.name)
    windows = {label: table.window for label, table in tables.items()}
    sinks = {label: table.local_sinks for label, table in tables.items()}
    warn_of_windows(windows, sinks, remedy="probe all of them with the same {}")
    warn_of_separators({label: table.metadata for label, table in tables.items()})
    write_agreement(folder, rows, windows, reporter=reporter)
    return AgreementResult(rows, folder, save_figure(folder, agreement_charts(rows)))
