"""Train the paper's palindrome comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.base.device import choose_device
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.contrib.reproduce.palindrome import results
from spkv_nas.contrib.reproduce.palindrome.options import NAME, PalindromeOptions
from spkv_nas.contrib.reproduce.palindrome.run import PalindromeSettings, compare
from spkv_nas.contrib.reproduce.palindrome.task import Palindromes
from spkv_nas.model.transformers_logging import quiet_transformers


@dataclass(frozen=True)
class PalindromeResult:
    """Table of the palindrome comparison, and the folder with table, curves and figure."""

    rows: pd.DataFrame
    folder: Path


def palindrome(options: PalindromeOptions, reporter: Reporter = SILENT) -> PalindromeResult:
    """Train the paper's palindrome comparison and write it to ``reports/<name>/``."""
    from spkv_nas.contrib.reproduce.palindrome.chart import palindrome_charts
    from spkv_nas.report.plot import save_chart

    quiet_transformers(reporter)
    options.folders.check_writable()
    settings = palindrome_settings(options)
    name = options.name or NAME
    folder = options.folders.report_dir(name)
    # Train the three models
    finished = compare(settings, options.folders.run_dir(name), device=choose_device(options.device), reporter=reporter)
    # Write table and figure
    results.write_results(folder, settings, finished)
    save_chart(folder, palindrome_charts(results.curve_table(finished), Palindromes(0).chance_nll))
    return PalindromeResult(results.result_table(settings, finished), folder)


def palindrome_settings(options: PalindromeOptions) -> PalindromeSettings:
    """Return the settings of the comparison, overridden by the options that are set."""
    overrides = {"steps": options.steps, "batch_size": options.batch_size, "seed": options.seed}
    return PalindromeSettings(**{key: value for key, value in overrides.items() if value is not None})


def show(result: PalindromeResult) -> None:
    """Print NLL, utility, density and training time of each kind of attention."""
    grid = Table("attention", "NLL", "hard NLL", "mean utility", "density %", "seconds", title="nats per output token")
    for row in result.rows.itertuples():
        has_gates = row.hard_nll == row.hard_nll  # not NaN
        gate_cells = (f"{row.hard_nll:.4f}", f"{row.mean_utility:.3f}") if has_gates else ("-", "-")
        grid.add_row(row.variant, f"{row.nll:.4f}", *gate_cells, f"{100 * row.density:.1f}", f"{row.seconds:.0f}")
    out.print(grid)
    print_path("figure", result.folder / "palindrome.png")
