"""The command line: parses, calls, prints. Heavy imports wait until a command runs, so that ``--help`` is quick."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spkv_nas import __version__
from spkv_nas.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from spkv_nas.density import DensityTable
    from spkv_nas.evaluation.sweep import Evaluation
    from spkv_nas.generation import Generation
    from spkv_nas.layout import Layout
    from spkv_nas.workspace import Workspace

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
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

WorkspaceOption = Annotated[
    Path, typer.Option("--workspace", "-w", help="Folder with probes/, layouts/, reports/, runs/.", show_default="here")
]
ProbeOption = Annotated[
    str,
    typer.Option("--probe", "-p", help="Density table: a name in the workspace, or a CSV file.", metavar="NAME|CSV"),
]
BudgetOption = Annotated[
    str, typer.Option("--budget", "-b", help="Global KV heads: a number, or a share such as 25%.", metavar="N|N%")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of random layouts.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda; CUDA if there is one.", show_default=False)
]
DEFAULT_NAME = "stdlib-21x3"


def _version(value: bool) -> None:
    if value:
        out.print(f"spkv-nas {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


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
    name: Annotated[str | None, typer.Option(help="Name of the result.")] = None,
    block_size: Annotated[int, typer.Option(min=2, help="Tokens per block, with --data.")] = 512,
    workspace: WorkspaceOption = Path(),
    device: DeviceOption = None,
) -> None:
    """Measure the density of every KV head. Writes probes/NAME/.

    Without arguments: the embedded reference on held-out standard library text.
    With --model and --data: your own SP-KV checkpoint. With a recipe: train the reference, then probe it.
    """
    from spkv_nas import stages

    table = stages.probe_stage(
        _workspace(workspace), recipe=recipe, model=model, data=data, tau=tau, name=name, block_size=block_size,
        device=device, announce=_announce,
    )  # fmt: skip
    _show_probe(table)


@app.command()
def propose(
    budget: BudgetOption = "18",
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
    workspace: WorkspaceOption = Path(),
) -> None:
    """Propose layouts for a budget of global heads, by every strategy. Writes layouts/NAME/."""
    from spkv_nas import stages
    from spkv_nas.proposal import tau_advice

    table, layouts, rows = stages.propose_stage(
        _workspace(workspace), probe, budget, tau=tau, window=window, num_random=num_random, seed=seed
    )
    _show_proposal(table, layouts, rows, _workspace(workspace))
    if tau is None and (advice := tau_advice(table, budget)) is not None:
        err.print(f"[yellow]{_escaped(advice)}[/yellow]")


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
    from spkv_nas import stages

    rows, correlation = stages.train_hybrid_stage(
        _workspace(workspace), probe, layouts, recipe=recipe, num_seeds=seeds, device=device, announce=_announce
    )
    _show_comparison(rows, correlation)


@app.command()
def report(probe: ProbeOption = DEFAULT_NAME, workspace: WorkspaceOption = Path()) -> None:
    """Write reports/NAME/index.html and the figures from what the other commands left in the workspace."""
    from spkv_nas import stages

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
    from spkv_nas import stages

    place = _workspace(workspace)
    name, evaluation, rows = stages.evaluate_stage(
        place, model=model, data=data, tau=tau, tau_sweep=tau_sweep, points=points, max_tokens=max_tokens, name=name,
        block_size=block_size, device=device, announce=_announce,
    )  # fmt: skip
    _show_evaluation(name, evaluation, rows)
    if rows is not None:
        out.print(f"sweep: [bold]{_escaped(str(place.report_dir(name) / 'tau-sweep.png'))}[/bold]")


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
    from spkv_nas import stages
    from spkv_nas.files import read_text

    if (prompt is None) == (file is None):
        raise UserError("give a prompt, or --file with one" if file is None else "give a prompt or --file, not both")
    if file is not None:
        prompt = sys.stdin.read() if str(file) == "-" else read_text(file, "prompt")
    result = stages.generate_stage(
        prompt or "", model=model, tau=tau, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p,
        seed=seed, device=device, stream=lambda text: print(text, end="", flush=True), announce=_announce,
    )  # fmt: skip
    print(flush=True)
    _show_generation(result)


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
    from spkv_nas import stages

    place = _workspace(workspace)
    rows = stages.palindrome_stage(
        place, steps=steps, batch_size=batch_size, seed=seed, name=name, device=device, announce=_announce
    )
    _show_palindrome(rows)
    out.print(f"figure: [bold]{_escaped(str(place.report_dir(name) / 'palindrome.png'))}[/bold]")


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")],
    workspace: WorkspaceOption = Path(),
    device: DeviceOption = None,
) -> None:
    """Train a recipe's dense model and its SP-KV reference; prints where the checkpoints are. Resumes."""
    from spkv_nas import stages

    dense, reference = stages.train_stage(_workspace(workspace), recipe, device=device, announce=_announce)
    out.print(f"dense checkpoint: {dense}\nSP-KV reference:  {reference}")


@app.command()
def export(
    layout: Annotated[Path, typer.Argument(help="Layout (YAML).")],
    model: Annotated[str, typer.Option(help="Checkpoint whose weights to write.")],
    to: Annotated[Path, typer.Option("--out", help="New folder.")],
) -> None:
    """Write a checkpoint with a layout applied as a Hugging Face folder: a stock architecture where there is one."""
    from spkv_nas.export import export as export_layout
    from spkv_nas.layout import Layout

    out.print(export_layout(Layout.read(layout), model, to))


@app.command()
def demo(budget: BudgetOption = "18", workspace: WorkspaceOption = Path()) -> None:
    """The whole path on the embedded reference: probe, propose, train-hybrid, report (a few minutes on two cores)."""
    from spkv_nas import stages

    start = time.perf_counter()
    place = _workspace(workspace)
    table = stages.probe_stage(place, announce=_announce)
    _show_probe(table)
    table, layouts, rows = stages.propose_stage(place, DEFAULT_NAME, budget, tau="match-budget", num_random=1)
    _show_proposal(table, layouts, rows, place)
    _show_comparison(*stages.train_hybrid_stage(place, DEFAULT_NAME, announce=_announce))
    page = stages.report_stage(place, DEFAULT_NAME)
    out.print(f"\nreport: [bold]{page}[/bold]  ({time.perf_counter() - start:.0f} s in all)")


def main(arguments: list[str] | None = None) -> None:
    """Entry point. A user's mistake prints its message and exits 2; ``--debug`` shows the traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        app(arguments)
    except SystemExit as done:
        if done.code:
            raise
    except UserError as error:
        if "--debug" in arguments:
            raise
        err.print(f"[bold red]error:[/bold red] {_escaped(str(error))}")
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted; the same command resumes")
        sys.exit(130)


def _workspace(root: Path) -> Workspace:
    from spkv_nas.workspace import Workspace

    return Workspace(root)


def _announce(line: str) -> None:
    err.print(f"[dim]{_escaped(line)}[/dim]")


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _show_probe(table: DensityTable) -> None:
    densest = max((table.density[i, j], i, j) for i in range(table.num_layers) for j in range(table.num_kv_heads))
    out.print(
        f"[bold]{_escaped(table.name)}[/bold]: {table.num_layers} layers x {table.num_kv_heads} KV heads, "
        f"tau {table.tau:g}: density mean {table.mean:.3f}, std {table.std:.3f}; densest is layer {densest[1]}, "
        f"head {densest[2]} ({densest[0]:.2f})"
    )
    for line in table.diagnosis():
        err.print(f"[yellow]{_escaped(line)}[/yellow]")


def _show_proposal(table: DensityTable, layouts: dict[str, Layout], rows: pd.DataFrame, place: Workspace) -> None:
    from spkv_nas.proposal import random_spread

    shown = Table(
        "strategy", "global heads", "density %", "coverage %", "note", title=f"density coverage at tau {table.tau:g}"
    )
    for row in rows.itertuples():
        shown.add_row(
            row.strategy, str(row.num_global), f"{row.density_percent:.1f}", f"{100 * row.coverage:.2f}", row.note
        )
    out.print(shown)
    spread = random_spread(rows)
    if spread is not None and spread[1] > 0:
        out.print(
            f"random layouts: coverage {100 * spread[0]:.2f} % on average, standard deviation {100 * spread[1]:.2f}"
        )
    out.print(f"layouts: {place.layout_dir(table.name)}")


def _show_evaluation(name: str, evaluation: Evaluation, rows: pd.DataFrame | None) -> None:
    num_tokens = evaluation.nll.num_tokens
    text = f"{num_tokens.sum():,} tokens in {(num_tokens > 0).sum()} documents"
    if rows is None:
        gated = (
            f", density {100 * evaluation.density:.1f} % at tau {evaluation.tau:g}"
            if evaluation.density is not None
            else ""
        )
        out.print(f"[bold]{_escaped(name)}[/bold]: NLL {evaluation.nll.mean:.4f}{gated}; {text}")
        return
    shown = Table("tau", "density %", "NLL", "ΔNLL %", title=f"{_escaped(name)}: {text}")
    for row in rows.itertuples():
        change = f"{row.delta_nll_percent:+.3f} ± {row.delta_nll_standard_error:.3f}" if row.tau else "-"
        shown.add_row(f"{row.tau:.4g}" if row.tau else "open", f"{100 * row.density:.1f}", f"{row.nll:.4f}", change)
    out.print(shown)


def _show_generation(result: Generation) -> None:
    share = result.cache_bytes / result.full_attention_bytes
    err.print(
        f"{result.num_new_tokens} tokens, {result.tokens_per_second:.1f} tokens/s, after a prompt of "
        f"{result.num_prompt_tokens} tokens in {result.prefill_seconds:.2f} s\n"
        f"cache {result.cache_bytes / 1e6:.2f} MB, full attention {result.full_attention_bytes / 1e6:.2f} MB: "
        f"{100 * share:.0f} %"
    )
    if result.density is not None:
        kept = "no key left the window" if math.isnan(result.density) else f"density {100 * result.density:.1f} %"
        err.print(f"{kept} at tau {result.tau:g}" if result.tau is not None else kept)


def _show_palindrome(rows: pd.DataFrame) -> None:
    shown = Table("attention", "NLL", "hard NLL", "mean utility", "density %", "seconds", title="nats per output token")
    for row in rows.itertuples():
        gated = row.hard_nll == row.hard_nll  # not NaN
        figures = (f"{row.hard_nll:.4f}", f"{row.mean_utility:.3f}") if gated else ("-", "-")
        shown.add_row(row.variant, f"{row.nll:.4f}", *figures, f"{100 * row.density:.1f}", f"{row.seconds:.0f}")
    out.print(shown)


def _show_comparison(rows: pd.DataFrame, correlation: dict[str, Any] | None) -> None:
    shown = Table("strategy", "density %", "coverage %", "NLL", "ΔNLL %", title="retrained from one dense checkpoint")
    for row in rows.itertuples():
        known = row.delta_nll_percent == row.delta_nll_percent  # not NaN
        change = f"{row.delta_nll_percent:+.3f} ± {row.delta_nll_standard_error:.3f}" if known else "-"
        shown.add_row(
            row.strategy, f"{row.density_percent:.1f}", f"{row.coverage_percent:.2f}", f"{row.nll:.4f}", change
        )
    out.print(shown)
    if correlation is not None:
        out.print(
            f"rank correlation of coverage and ΔNLL over {correlation['layouts']} layouts: {correlation['rho']:+.2f} "
            f"(p = {correlation['p_value']:.2f}; -1 would mean that coverage orders them perfectly)"
        )


if __name__ == "__main__":
    main()
