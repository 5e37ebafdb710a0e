"""Train the paper's palindrome comparison, and write its table, curves and figure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.base import console, progress, records, replace, tables, version
from spkv_nas.base.device import choose_device
from spkv_nas.contrib.reproduce.palindrome.options import NAME, PalindromeOptions
from spkv_nas.contrib.reproduce.palindrome.run import SLIDING_WINDOW, PalindromeRun, PalindromeSettings, compare
from spkv_nas.contrib.reproduce.palindrome.task import Palindromes
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.report.axes import round_axis
from spkv_nas.report.chart import Chart, Dash, Line, Mark, Panels, Rule, Tone, numbers
from spkv_nas.stages.result import Result

COLUMNS = ("variant", "nll", "hard_nll", "mean_utility", "density", "steps", "seconds")
_VARIANTS: tuple[tuple[Tone, Dash], ...] = (("ink", "solid"), ("second", "dashed"), ("accent", "dashdot"))


@dataclass(frozen=True)
class PalindromeResult:
    """Table of the palindrome comparison, and the folder with table, curves and figure."""

    rows: pd.DataFrame
    folder: Path


def palindrome(options: PalindromeOptions, reporter: progress.Reporter = progress.SILENT) -> PalindromeResult:
    """Train the paper's palindrome comparison and write it to ``reports/<name>/``."""
    from spkv_nas.report.plot import save_chart

    quiet_transformers(reporter)
    options.folders.check_writable()
    overrides = {"steps": options.steps, "batch_size": options.batch_size, "seed": options.seed}
    settings = PalindromeSettings(**{key: value for key, value in overrides.items() if value is not None})
    name = options.name or NAME
    folder = options.folders.report_dir(name)
    # Train the three models
    finished = compare(settings, options.folders.run_dir(name), device=choose_device(options.device), reporter=reporter)
    # Write table, curves and figure
    rows, curves = result_table(settings, finished), pd.concat([run.curve for run in finished])
    with replace.replacing(folder) as new:
        tables.write_csv(new / "palindrome.csv", rows)
        tables.write_csv(new / "palindrome-curves.csv", curves)
        records.write_record(new / "palindrome.yaml", _background(settings, finished))
    save_chart(folder, palindrome_charts(curves, Palindromes(0).chance_nll))
    return PalindromeResult(rows, folder)


def show(result: PalindromeResult) -> None:
    """Print NLL, utility, density and training time of each kind of attention."""
    grid = Table("attention", "NLL", "hard NLL", "mean utility", "density %", "seconds", title="nats per output token")
    for row in result.rows.itertuples():
        has_gates = row.hard_nll == row.hard_nll  # not NaN
        gate_cells = (f"{row.hard_nll:.4f}", f"{row.mean_utility:.3f}") if has_gates else ("-", "-")
        grid.add_row(row.variant, f"{row.nll:.4f}", *gate_cells, f"{100 * row.density:.1f}", f"{row.seconds:.0f}")
    console.out.print(grid)
    console.print_path("figure", result.folder / "palindrome.png")


def run(options: PalindromeOptions, reporter: progress.Reporter) -> Result:
    """Run the command."""
    return Result(palindrome(options, reporter), show)


def result_table(settings: PalindromeSettings, finished: Sequence[PalindromeRun]) -> pd.DataFrame:
    """Tabulate the variants, columns ``COLUMNS``, with density 1 of full attention and 0 of the sliding window."""
    rows = [{**vars(run), "steps": settings.steps} for run in finished]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.assign(
        density=table["density"].fillna(table["variant"].map({FULL_ATTENTION: 1.0, SLIDING_WINDOW: 0.0}))
    )


def _background(settings: PalindromeSettings, finished: Sequence[PalindromeRun]) -> dict[str, Any]:
    """Return the record: task, settings, density by kind of token, hardware and versions."""
    task = Palindromes(settings.num_heldout)
    return {
        "settings": asdict(settings),
        "num_tokens": task.length,
        "num_instruction_tokens": task.kinds.count("instruction"),
        "num_output_tokens": task.num_outputs,
        "chance_nll": round(task.chance_nll, 4),
        "num_parameters": {run.variant: run.num_parameters for run in finished},
        "density_by_token": {run.variant: run.kept for run in finished if run.kept is not None},
        "hardware": {run.variant: run.hardware for run in finished},
        "environment": version.environment(),
    }


def palindrome_charts(curves: pd.DataFrame, chance_nll: float) -> Panels:
    """Return training loss by variant, and mean utility and density of the gates, by step.

    SP-KV paper, appendix "Palindrome reversal with long instruction gap". ``curves`` has the columns of
    ``CURVE_COLUMNS``; ``chance_nll`` is the NLL, in nats per output token, of a model that sees nothing of the list.
    """
    steps = round_axis("Step", 0, float(curves["step"].max()), exact=True)
    # Loss of each variant
    losses: list[Mark] = [Rule(chance_nll, f"chance {chance_nll:.2f}", vertical=False, tone="muted", dash="dotted")]
    for (variant, curve), (tone, dash) in zip(curves.groupby("variant", sort=False), _VARIANTS, strict=False):
        losses.append(Line(numbers(curve["step"]), numbers(curve["loss"]), str(variant), tone, dash, 2.2))
    # Gates
    gated = curves.dropna(subset=["mean_utility"])
    gated_steps = numbers(gated["step"])
    gates = (
        Line(gated_steps, numbers(gated["mean_utility"]), "mean utility", width=2.2),
        Line(gated_steps, numbers(gated["density"]), "density", "muted", "dotted", 2.2),
    )
    charts = (
        ("loss", "Training loss, nats per output token", 2 * chance_nll, tuple(losses)),
        ("gates", "SP-KV gates, mean over heads and tokens", 1.0, gates),
    )
    panels = [
        Chart(f"palindrome-{name}", title, steps, round_axis(title, 0, high), marks)
        for name, title, high, marks in charts
    ]
    return Panels("palindrome", tuple(panels))
