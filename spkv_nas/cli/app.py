"""The command line: parses, calls, prints. Heavy imports wait until a command runs, so that ``--help`` is quick."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spkv_nas.base.distributed import disconnect, num_processes, process_index
from spkv_nas.base.errors import UserError
from spkv_nas.base.version import __version__
from spkv_nas.cli import cost as cli_cost
from spkv_nas.cli import search, show
from spkv_nas.cli import study as cli_study
from spkv_nas.cli.layout import app as layout_app
from spkv_nas.cli.layout import schema

if TYPE_CHECKING:
    from spkv_nas.base.workspace import Workspace

app = typer.Typer(
    name="spkv-nas",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure which KV heads need global attention, propose hybrid layouts, and prove them by retraining.\n\n"
    "The path: spkv-nas probe, then propose --budget 18, then train-hybrid, then report. "
    "Without arguments every command works on the embedded reference model (21 layers x 3 KV heads).",
)
out = Console(highlight=False, quiet=process_index() > 0)
err = Console(stderr=True, highlight=False, quiet=process_index() > 0)

WorkspaceOption = Annotated[
    Path, typer.Option("--workspace", "-w", help="Folder with probes/, layouts/, reports/, runs/.", show_default="here")
]
ProbeOption = Annotated[
    str,
    typer.Option(
        "--probe", "-p", help="Density table: a name in the workspace, or a file (CSV, TSV).", metavar="NAME|FILE"
    ),
]
BudgetOption = Annotated[
    str, typer.Option("--budget", "-b", help="Global KV heads: a number, or a share such as 25%.", metavar="N|N%")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of random layouts.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda; CUDA if there is one.", show_default=False)
]
DEFAULT_NAME = "stdlib-21x3"
DISTRIBUTED = ("train", "train-hybrid")
OTHERS_WAIT = 5.0  # seconds; an error of process 0 too is printed by it, and torchrun then ends this process


def _version(value: bool) -> None:
    if value:
        out.print(f"spkv-nas {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if num_processes() > 1 and context.invoked_subcommand not in DISTRIBUTED:
        raise UserError(f"torchrun is for {' and '.join(DISTRIBUTED)}: run {context.invoked_subcommand} without it")


@app.command()
def probe(
    recipe: Annotated[
        Path | None, typer.Argument(help="Recipe (YAML): trains the reference first if it is not there yet.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="SP-KV checkpoint: a folder, an id, or embedded:reference.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Text to probe on: files or folders; repeat for several.")
    ] = None,
    tau: Annotated[float | None, typer.Option(help="Threshold in [0, 1]; the checkpoint's by default.")] = None,
    signal: Annotated[
        str, typer.Option(help="density, or a rival of it: attention-mass, duo, retrieval; they need no gates.")
    ] = "density",
    window: Annotated[
        int | None,
        typer.Option(help="Window of the rival signals; the gates' or 128 by default.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps that duo learns for; 200 by default.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Use at most so many tokens, from the first; all by default.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the result.")] = None,
    block_size: Annotated[int, typer.Option(min=2, help="Tokens per block, with --data.")] = 512,
    workspace: WorkspaceOption = Path(),
    device: DeviceOption = None,
) -> None:
    """Measure the density of every KV head, or another signal. Writes probes/NAME/, or probes/NAME-SIGNAL/.

    Without arguments: the embedded reference on held-out standard library text.
    With --model and --data: your own checkpoint. With a recipe: train the reference, then probe it.
    """
    from spkv_nas.stages import all as stages

    table = stages.probe_stage(
        _workspace(workspace), recipe=recipe, model=model, data=data, tau=tau, signal=signal, window=window,
        steps=steps, max_tokens=max_tokens, name=name, block_size=block_size, device=device, announce=_announce,
    )  # fmt: skip
    show.probe(table)


@app.command()
def propose(
    budget: search.ProposeBudgetOption = None,
    probe: ProbeOption = DEFAULT_NAME,
    tau: Annotated[
        str | None,
        typer.Option(
            help="Another threshold, or match-budget: the one whose mean density is the budget's share of heads.",
            metavar="TAU",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Window of local heads; the probe's by default.", show_default=False)
    ] = None,
    num_random: Annotated[int, typer.Option(min=0, help="Number of random layouts.")] = 3,
    seed: SeedOption = 0,
    kv_bytes: search.KvBytesOption = None,
    context: search.ContextOption = None,
    batch: search.BatchOption = 1,
    head_dim: search.HeadDimOption = None,
    dtype: search.DtypeOption = None,
    robust: search.RobustOption = False,
    min_per_layer: search.MinPerLayerOption = None,
    max_per_layer: search.MaxPerLayerOption = None,
    global_layers: search.GlobalLayersOption = None,
    local_layers: search.LocalLayersOption = None,
    granularity: search.GranularityOption = "head",
    uniform: search.UniformOption = False,
    weights: search.WeightsOption = None,
    workspace: WorkspaceOption = Path(),
) -> None:
    """Propose layouts for a budget of global heads, by every strategy. Writes layouts/NAME/.

    With a constraint, --robust or --weights: also the best layout that meets it.
    With a range of budgets: the best layout at each, and their curve, layouts/NAME/budgets.csv.
    """
    from spkv_nas.proposal.propose import tau_advice
    from spkv_nas.proposal.requirements import Requirements
    from spkv_nas.stages import all as stages

    place = _workspace(workspace)
    requirements = Requirements.of(
        kv_bytes=kv_bytes, context=context, batch=batch, head_dim=head_dim, dtype=dtype, robust=robust,
        min_per_layer=min_per_layer, max_per_layer=max_per_layer, global_layers=global_layers,
        local_layers=local_layers, granularity=granularity, uniform=uniform, weights=weights,
    )  # fmt: skip
    if budget is not None and requirements.asks_for_curve(budget, tau):
        from spkv_nas.stages.search import budgets_stage

        curve = budgets_stage(place, probe, budget, tau=tau, window=window, requirements=requirements)
        search.show_budgets(curve, place.layout_dir(curve.table.name))
        return
    answer = stages.propose_stage(
        place, probe, budget, tau=tau, window=window, num_random=num_random, seed=seed, requirements=requirements
    )
    table, layouts = answer.table, answer.layouts
    show.proposal(table, layouts, answer.rows, place)
    search.show_answers(table, layouts, answer.rows, answer.certainty, requirements, window)
    if tau is None and (advice := tau_advice(table, layouts["densest"].num_global)) is not None:
        err.print(f"[yellow]{_escaped(advice)}[/yellow]")


app.command()(search.compare)
app.command("search")(cli_study.search)


@app.command("train-hybrid")
def train_hybrid(
    layouts: Annotated[
        list[Path] | None, typer.Argument(help="Layout files; all of layouts/NAME/ by default.", show_default=False)
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Recipe (YAML) with the dense model and the branches; the embedded one by default."),
    ] = None,
    probe: ProbeOption = DEFAULT_NAME,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions with another data order.")] = 1,
    workspace: WorkspaceOption = Path(),
    device: DeviceOption = None,
) -> None:
    """Retrain every layout, full attention and SP-KV from one dense checkpoint. Writes reports/NAME/comparison.csv.

    A finished run is not run again, an interrupted one resumes: repeat the same command.
    """
    from spkv_nas.stages import all as stages

    rows, correlations = stages.train_hybrid_stage(
        _workspace(workspace), probe, layouts, recipe=recipe, num_seeds=seeds, device=device, announce=_announce
    )
    show.comparison(rows, correlations)


@app.command()
def report(probe: ProbeOption = DEFAULT_NAME, workspace: WorkspaceOption = Path()) -> None:
    """Write reports/NAME/index.html and the figures from what the other commands left in the workspace."""
    from spkv_nas.stages import all as stages

    page = stages.report_stage(_workspace(workspace), probe)
    out.print(f"report: [bold]{page}[/bold]")


@app.command()
def evaluate(
    model: Annotated[
        str, typer.Option(help="Checkpoint, with or without gates: a folder, an id, or embedded:NAME.")
    ] = "embedded:reference",
    data: Annotated[
        list[str] | None, typer.Option(help="Text to evaluate on: files or folders; repeat for several.")
    ] = None,
    tau: Annotated[float | None, typer.Option(help="Threshold in [0, 1]; the checkpoint's by default.")] = None,
    tau_sweep: Annotated[
        str | None,
        typer.Option(
            help="Thresholds to compare with open gates: a range, evenly spaced in logit, or a list.",
            metavar="LOW..HIGH|LIST",
        ),
    ] = None,
    points: Annotated[
        int | None, typer.Option(help="Thresholds of a range, its ends included; 13 by default.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Use at most so many tokens, from the first; all by default.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the result.")] = None,
    block_size: Annotated[int, typer.Option(min=2, help="Tokens per block, with --data.")] = 512,
    workspace: WorkspaceOption = Path(),
    device: DeviceOption = None,
) -> None:
    """Measure held-out NLL. With --tau-sweep: NLL against density as tau moves. Writes reports/NAME/tau-sweep.csv.

    Without --data: the held-out standard library text of the embedded models. Without --tau-sweep nothing is written.
    """
    from spkv_nas.stages import all as stages

    place = _workspace(workspace)
    name, evaluation, rows = stages.evaluate_stage(
        place, model=model, data=data, tau=tau, tau_sweep=tau_sweep, points=points, max_tokens=max_tokens, name=name,
        block_size=block_size, device=device, announce=_announce,
    )  # fmt: skip
    show.evaluation(name, evaluation, rows)
    if rows is not None:
        out.print(f"sweep: [bold]{_escaped(str(place.report_dir(name) / 'tau-sweep.png'))}[/bold]")


@app.command()
def score(
    layouts: Annotated[
        list[Path] | None, typer.Argument(help="Layout files; all of layouts/NAME/ by default.", show_default=False)
    ] = None,
    model: Annotated[
        str, typer.Option(help="Checkpoint, dense or SP-KV: a folder, an id, or embedded:NAME.")
    ] = "embedded:dense",
    data: Annotated[
        list[str] | None, typer.Option(help="Text to score on: files or folders; repeat for several.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Use at most so many tokens, from the first; all by default.", show_default=False)
    ] = None,
    probe: Annotated[
        str | None, typer.Option("--probe", "-p", help="Count coverage with this table.", metavar="NAME|FILE")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the result; the probe's or the model's by default.")] = None,
    block_size: Annotated[int, typer.Option(min=2, help="Tokens per block, with --data.")] = 512,
    workspace: WorkspaceOption = Path(),
    device: DeviceOption = None,
) -> None:
    """Score layouts without training: NLL of a checkpoint with each on it. Writes reports/NAME/zero-shot.csv.

    Finished scores are kept in runs/NAME/zero-shot/ and not computed again.
    """
    from spkv_nas.stages import all as stages

    place = _workspace(workspace)
    name, rows = stages.score_stage(
        place, layouts, model=model, data=data, max_tokens=max_tokens, probe=probe, name=name, block_size=block_size,
        device=device, announce=_announce,
    )  # fmt: skip
    show.scores(name, rows, place.report_dir(name))


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file; - is standard input.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Checkpoint, dense, hybrid or SP-KV: a folder, an id, or embedded:NAME.")
    ] = "embedded:reference",
    tau: Annotated[
        float | None,
        typer.Option(help="Threshold in [0, 1]; the checkpoint's by default. A higher one keeps fewer keys."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Stop after so many.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token, more samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this share of the probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    device: DeviceOption = None,
) -> None:
    """Continue a prompt with the per-head paged cache; says tokens/s, bytes of the cache, and density.

    The text goes to standard output, the figures to standard error. A dense checkpoint uses the cache of transformers.
    """
    from spkv_nas.base.files import read_text
    from spkv_nas.stages import all as stages

    if (prompt is None) == (file is None):
        raise UserError("give a prompt, or --file with one" if file is None else "give a prompt or --file, not both")
    if file is not None:
        prompt = sys.stdin.read() if str(file) == "-" else read_text(file, "prompt")
    result = stages.generate_stage(
        prompt or "", model=model, tau=tau, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
        seed=seed, device=device, stream=lambda text: print(text, end="", flush=True), announce=_announce,
    )  # fmt: skip
    print(flush=True)
    show.generation(result)


@app.command()
def palindrome(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each model.", show_default="500")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per step.", show_default="32")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, predictors and sequences.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the result.")] = "palindrome",
    workspace: WorkspaceOption = Path(),
    device: DeviceOption = None,
) -> None:
    """The paper's toy task: reverse a list from beyond the window. Writes reports/NAME/palindrome.csv and its figure.

    Trains three small models from scratch: full attention, a sliding window of 32, SP-KV with window 32. A finished
    one is not trained again, an interrupted one resumes: repeat the same command.
    """
    from spkv_nas.stages import all as stages

    place = _workspace(workspace)
    rows = stages.palindrome_stage(
        place, steps=steps, batch_size=batch_size, seed=seed, name=name, device=device, announce=_announce
    )
    show.palindrome(rows)
    out.print(f"figure: [bold]{_escaped(str(place.report_dir(name) / 'palindrome.png'))}[/bold]")


@app.command()
def scaling(
    runs: Annotated[
        Path | None,
        typer.Argument(
            help="CSV with a row per run: train_flops (training compute), nll (nats per token); if there, name, "
            "variant (a ladder of its own, such as dense or sp-kv) and held_out (1: predicted, not fitted). "
            "The paper's levels by default.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the result.")] = None,
    workspace: WorkspaceOption = Path(),
) -> None:
    """Fit the scaling law L(C) = L_inf + A C^-alpha. Writes reports/NAME/scaling.yaml and the figure.

    At least four runs of different compute per variant. Predicts the held-out runs, and the last one from the others.
    """
    from spkv_nas.stages import all as stages

    place = _workspace(workspace)
    name, fits = stages.scaling_stage(place, runs, name=name)
    for law in fits:
        show.scaling(name, law)
    out.print(f"scaling: [bold]{_escaped(str(place.report_dir(name) / 'scaling.png'))}[/bold]")


app.command()(cli_cost.cost)
app.command()(cli_cost.calibrate)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")],
    workspace: WorkspaceOption = Path(),
    device: DeviceOption = None,
) -> None:
    """Train a recipe's dense model and its SP-KV reference; prints where the checkpoints are. Resumes."""
    from spkv_nas.stages import all as stages

    dense, reference = stages.train_stage(_workspace(workspace), recipe, device=device, announce=_announce)
    out.print(f"dense checkpoint: {dense}\nSP-KV reference:  {reference}")


@app.command()
def ablate(
    file: Annotated[
        Path | None, typer.Argument(help="Ablations (YAML): name, recipe, rows; the embedded ones if none.")
    ] = None,
    workspace: WorkspaceOption = Path(),
    device: DeviceOption = None,
) -> None:
    """Train variants of one recipe and compare them with the first. Writes reports/NAME/ablations.csv. Resumes.

    A row is a section of a recipe with other values (gates: {window: 8}), {variant: full-attention}, or
    {layout: FILE}; see the README.
    """
    from spkv_nas.stages import all as stages

    place = _workspace(workspace)
    name, rows = stages.ablate_stage(place, file, device=device, announce=_announce)
    shown = Table("", "density %", "Δ density %", "NLL", "ΔNLL %", title=_escaped(name))
    for row in rows.itertuples():
        error = f"{row.delta_nll_percent:+.3f} ± {row.delta_nll_standard_error:.3f}" if row.Index else "-"
        change = f"{row.delta_density_percent:+.1f}" if row.Index else "-"
        shown.add_row(_escaped(row.name), f"{row.density_percent:.1f}", change, f"{row.nll:.4f}", error)
    out.print(shown)
    out.print(f"table: [bold]{_escaped(str(place.report_dir(name) / 'ablations.csv'))}[/bold]")


@app.command()
def export(
    layout: Annotated[Path, typer.Argument(help="Layout (YAML).")],
    model: Annotated[str, typer.Option(help="Checkpoint whose weights to write.")],
    to: Annotated[Path, typer.Option("--out", help="New folder.")],
) -> None:
    """Write a checkpoint with a layout applied as a Hugging Face folder: a stock architecture where there is one."""
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.model.export import export as export_layout

    out.print(export_layout(Layout.read(layout), model, to))


app.command()(schema)
app.add_typer(layout_app)


@app.command()
def demo(budget: BudgetOption = "18", workspace: WorkspaceOption = Path()) -> None:
    """The whole path on the embedded reference: probe, propose, train-hybrid, report (a few minutes on two cores)."""
    from spkv_nas.stages import all as stages

    start = time.perf_counter()
    place = _workspace(workspace)
    table = stages.probe_stage(place, announce=_announce)
    show.probe(table)
    answer = stages.propose_stage(place, DEFAULT_NAME, budget, tau="match-budget", num_random=1)
    show.proposal(answer.table, answer.layouts, answer.rows, place)
    show.comparison(*stages.train_hybrid_stage(place, DEFAULT_NAME, announce=_announce))
    page = stages.report_stage(place, DEFAULT_NAME)
    out.print(f"\nreport: [bold]{page}[/bold]  ({time.perf_counter() - start:.0f} s in all)")


def main(arguments: list[str] | None = None) -> None:
    """Entry point. A user's mistake prints its message and exits 2; ``--debug`` shows the traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            app(arguments)
    except SystemExit as done:
        if done.code:
            raise
        if num_processes() > 1:
            disconnect()
    except UserError as error:
        if "--debug" in arguments:
            raise
        if process_index():
            time.sleep(OTHERS_WAIT)
            err.quiet = False
        err.print(f"[bold red]error:[/bold red] {_escaped(str(error))}")
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted; the same command resumes")
        sys.exit(130)


def _show_warning(usual: Callable[..., None], message: Warning | str, kind: type[Warning], file: str, *at: Any) -> None:
    """Our own warnings as their text alone, all others in Python's way."""
    if kind is UserWarning and Path(file).is_relative_to(Path(__file__).parents[1]):
        err.print(f"[yellow]warning:[/yellow] {_escaped(str(message))}")
    else:
        usual(message, kind, file, *at)


def _workspace(root: Path) -> Workspace:
    from spkv_nas.base.workspace import Workspace

    return Workspace(root)


def _announce(line: str) -> None:
    err.print(f"[dim]{_escaped(line)}[/dim]")


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
