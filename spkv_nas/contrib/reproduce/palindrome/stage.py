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
from spkv_nas.contrib.reproduce.palindrome.run import (
    VARIANTS,
    PalindromeSettings,
    compare,
    is_finished,
    new_model,
    variant_folder,
)
from spkv_nas.contrib.reproduce.palindrome.task import Palindromes
from spkv_nas.cost.stage_costs import Training
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.result import Result
from spkv_nas.training.run_files import newest_step
from spkv_nas.training.run_plan import FINISHED, Plan, PlannedRun
from spkv_nas.training.step_cost import measure


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


def plan(options: PalindromeOptions, reporter: Reporter) -> Plan:
    """Plan the training of all variants, some of which may be finished."""
    settings, name = palindrome_settings(options), options.name or NAME
    runs, device = options.folders.run_dir(name), choose_device(options.device)
    reporter.announce("timing a training step of each model")
    shape, training = (
        (settings.batch_size, Palindromes(0).length),
        Training(settings.steps, settings.batch_size, bfloat16=False),
    )
    planned = []
    for variant in VARIANTS:
        folder = variant_folder(settings, variant, runs)
        # Finished run
        if is_finished(folder):
            planned.append(PlannedRun(variant, settings.steps, 0, 0.0, FINISHED))
            continue
        # New or interrupted run
        done = newest_step(folder)
        cost = measure(new_model(settings, variant), shape, training, device=device)
        remaining = settings.steps - done
        state = f"goes on from step {done}" if done else ""
        tokens, seconds = remaining * shape[0] * shape[1], remaining * cost.seconds(settings.batch_size)
        planned.append(PlannedRun(variant, settings.steps, tokens, seconds, state))
    return Plan(name, tuple(planned))


def run(options: PalindromeOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(palindrome(options, reporter), show)
