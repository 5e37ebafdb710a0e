"""The command ``search``: layouts by Optuna."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spkv_nas.cli import search as options

if TYPE_CHECKING:
    import pandas as pd

    from spkv_nas.evaluation.guidance import Reached
    from spkv_nas.search.trials import Effort

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
_PANEL = "How much to search"
_ROWS = 12


def search(
    layouts: Annotated[
        list[Path] | None,
        typer.Argument(help="Layouts to compare with, beside the strategies'.", show_default=False),
    ] = None,
    start: Annotated[
        list[Path] | None,
        typer.Option(help="Layout to start from too; repeat for several.", show_default=False),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            "-b",
            help="Global KV heads: a number, a share, or with a second objective a range.",
            metavar="N|N%|RANGE",
        ),
    ] = "18",
    probe: Annotated[
        str, typer.Option("--probe", "-p", help="Density table that guides: a name or a file.", metavar="NAME|FILE")
    ] = "stdlib-21x3",
    tau: Annotated[str | None, typer.Option(help="Another threshold, or match-budget.", metavar="TAU")] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Recipe (YAML) with dense model, text and branches; the embedded one by default."),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="nll; or nll,kv-bytes or nll,time for the front of both.", metavar="NAMES")
    ] = "nll",
    trials: Annotated[
        int, typer.Option(min=1, help="Layouts scored without training, per sampler and seed.", rich_help_panel=_PANEL)
    ] = 100,
    seeds: Annotated[int, typer.Option(min=1, help="Studies per sampler.", rich_help_panel=_PANEL)] = 1,
    control: Annotated[
        str,
        typer.Option(
            help="Samplers to compare with: random, tpe (without densities), both by comma, or none.",
            metavar="NAMES",
            rich_help_panel=_PANEL,
        ),
    ] = "random",
    short: Annotated[
        int, typer.Option(min=0, help="Best layouts of each sampler to retrain briefly.", rich_help_panel=_PANEL)
    ] = 8,
    full: Annotated[int, typer.Option(min=0, help="Best of those to retrain in full.", rich_help_panel=_PANEL)] = 4,
    short_steps: Annotated[
        int | None,
        typer.Option(min=1, help="A fourth of the recipe's by default.", rich_help_panel=_PANEL, show_default=False),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Held-out tokens to choose on; half of them at most.", rich_help_panel=_PANEL)
    ] = 65_536,
    context: options.ContextOption = None,
    batch: options.BatchOption = 1,
    head_dim: options.HeadDimOption = None,
    dtype: options.DtypeOption = None,
    calibration: Annotated[
        str | None, typer.Option(help="Results whose calibration gives the time; this name's by default.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="Take the time from the roofline of this GPU instead.")] = None,
    min_per_layer: options.MinPerLayerOption = None,
    max_per_layer: options.MaxPerLayerOption = None,
    global_layers: options.GlobalLayersOption = None,
    local_layers: options.LocalLayersOption = None,
    granularity: options.GranularityOption = "head",
    uniform: options.UniformOption = False,
    window: Annotated[
        int | None, typer.Option(min=1, help="Window of local heads; the probe's by default.", show_default=False)
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Optuna storage, such as postgresql://...; SQLite in runs/NAME/search/ by default."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the results; the probe's by default.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first study.")] = 0,
    workspace: Annotated[
        Path,
        typer.Option("--workspace", "-w", help="Folder with probes/, layouts/, reports/, runs/.", show_default="here"),
    ] = Path(),
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; CUDA if there is one.", show_default=False)
    ] = None,
) -> None:
    """Search for better layouts than density's. Writes reports/NAME/search.csv and layouts/NAME/search/.

    Many are scored without training, the best retrained briefly, the best of those in full, and judged on text that
    the search has not seen. Start the same command again, here or on another machine with the same workspace, and both
    work on one study; killed or interrupted, it goes on where it was.
    """
    from spkv_nas.base.workspace import Workspace
    from spkv_nas.stages.search import search_stage

    place = Workspace(workspace)
    demand = options.make_demand(
        kv_bytes=None, context=context, batch=batch, head_dim=head_dim, dtype=dtype, robust=False,
        min_per_layer=min_per_layer, max_per_layer=max_per_layer, global_layers=global_layers,
        local_layers=local_layers, granularity=granularity, uniform=uniform, weights=None,
    )  # fmt: skip
    effort = _effort(trials, control, range(seed, seed + seeds), short, full, short_steps, max_tokens)
    found, _, rows = search_stage(
        place, probe, budget, effort, start_files=start, other_files=layouts, recipe=recipe, tau=tau, window=window,
        demand=demand, objective=objective, calibration=calibration, hardware=hardware, storage=storage, name=name,
        device=device, announce=lambda line: err.print(f"[dim]{escape(line)}[/dim]"),
    )  # fmt: skip
    _show(rows, place.report_dir(name or found.space.table.name), None if found.cost is None else found.cost.name)


def _effort(
    trials: int, control: str, seeds: range, short: int, full: int, short_steps: int | None, max_tokens: int
) -> Effort:
    from spkv_nas.base.errors import UserError
    from spkv_nas.search.sampler import DENSITY, KINDS
    from spkv_nas.search.trials import Effort

    controls = list(dict.fromkeys(part.strip() for part in control.split(",") if part.strip() != "none"))
    for kind in controls:
        if kind not in KINDS or kind == DENSITY:
            raise UserError(f"--control '{kind}' is unknown; there are random, tpe and none")
    return Effort(
        trials=trials, samplers=(DENSITY, *controls), seeds=tuple(seeds), short=short, full=min(full, short),
        short_steps=short_steps, max_tokens=max_tokens,
    )  # fmt: skip


def _show(rows: pd.DataFrame, folder: Path, cost: str | None) -> None:
    from spkv_nas.evaluation.guidance import best_layouts, correlations, guidance

    columns = ["layout", "global heads", "coverage %", *([cost] if cost else [])]
    shown = Table(*columns, "zero-shot ΔNLL %", "short", "full ΔNLL %", title="best layouts")
    for row in best_layouts(rows, _ROWS).to_dict("records"):
        shown.add_row(
            escape(row["name"]), str(row["num_global"]), f"{row['coverage_percent']:.1f}",
            *([f"{row['cost']:.4g}"] if cost else []), f"{row['zero_shot_delta_percent']:+.3f}",
            options.change(row["short_delta_percent"]),
            options.change(row["full_delta_percent"], row["full_standard_error"]),
        )  # fmt: skip
    out.print(shown)
    for sampler, reached in guidance(rows).items():
        for sentence in _sentences(sampler, reached, "hypervolume" if cost else "lowest zero-shot ΔNLL, %"):
            out.print(escape(sentence))
    for pair, found in correlations(rows).items():
        if found is not None:
            low, high = found["interval"]
            out.print(
                f"rank correlation of {pair} over {found['layouts']} layouts: {found['rho']:+.2f} "
                f"({low:+.2f} to {high:+.2f})"
            )
    out.print(f"search: [bold]{escape(str(folder / 'search.csv'))}[/bold]", soft_wrap=True)


def _sentences(sampler: str, reached: Reached, quality: str) -> list[str]:
    said = []
    if reached.after_trials:
        steps = ", ".join(f"{value:.3f} after {count}" for count, value in reached.after_trials.items())
        number, error = len(reached.by_seed), reached.standard_error
        spread = f" (± {error:.3f} over {number} seeds)" if error is not None else ""
        said.append(f"{sampler}: {quality}: {steps}{spread}")
    if (best := reached.retrained) is not None:
        said.append(
            f"{sampler}: retrained in full, the best of the short retraining, {best.layout}: ΔNLL "
            f"{best.delta_nll_percent:+.3f} ± {best.standard_error:.3f} %"
        )
    return said
