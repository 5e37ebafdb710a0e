"""The commands as functions: each reads its inputs from a workspace, does one stage, and writes its results there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.distributed import on_main, process_index
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_yaml, write_atomic
from spkv_nas.base.version import environment
from spkv_nas.base.workspace import Workspace
from spkv_nas.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spkv_nas.data.blocks import TokenBlocks
    from spkv_nas.evaluation.sweep import Evaluation
    from spkv_nas.model.generation import Generation
    from spkv_nas.proposal.requirements import Demand
    from spkv_nas.proposal.stability import Certainty

Announce = Callable[[str], None]
PAPER = "paper"  # name of the results on the paper's own ladder


def _silent(_: str) -> None:
    pass


def train_stage(
    workspace: Workspace, recipe_file: Path, *, device: str | None = None, announce: Announce = _silent
) -> tuple[Path, Path]:
    """Train a recipe's dense model and its SP-KV branch; their checkpoints. Finished ones are not trained again."""
    from spkv_nas.training.branches import Trunk
    from spkv_nas.training.corpus import join_processes
    from spkv_nas.training.variants import Variant

    _quiet()
    recipe = Recipe.read(recipe_file)
    join_processes(recipe, device)
    workspace.check_writable()
    for line in recipe.warnings():
        announce(f"warning: {line}")
    runs = workspace.run_dir(recipe.name)
    trunk = Trunk.prepare(recipe, recipe_file.parent, runs, device=device, announce=announce)
    reference = trunk.train(Variant.sp_kv()).checkpoint
    on_main(lambda: _show_training(reference, workspace.report_dir(recipe.name)))
    return trunk.dense, reference


def _show_training(checkpoint: Path, folder: Path) -> None:
    """``density-evolution`` (.csv and figure) and ``heldout-log.csv`` of a run, if it was long enough to log them."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.training_charts import density_evolution_chart

    log, heldout = checkpoint / "density-log.csv", checkpoint / "heldout-log.csv"
    if log.is_file():
        write_atomic(folder / "density-evolution.csv", log.read_text())
        save_chart(folder, density_evolution_chart(pd.read_csv(log)))
    if heldout.is_file():
        write_atomic(folder / "heldout-log.csv", heldout.read_text())


def probe_stage(
    workspace: Workspace,
    *,
    recipe: Path | None = None,
    model: str | None = None,
    data: list[str] | None = None,
    tau: float | None = None,
    signal: str = "density",
    window: int | None = None,
    steps: int | None = None,
    max_tokens: int | None = None,
    name: str | None = None,
    block_size: int = 512,
    device: str | None = None,
    announce: Announce = _silent,
) -> DensityTable:
    """Probe a recipe's reference (trained first if need be), a checkpoint of one's own, or the embedded reference.

    A ``signal`` other than density needs no gates; it is written under the name with the signal's behind it.
    """
    from spkv_nas.probing import signals
    from spkv_nas.probing.density import probe

    _quiet()
    signals.check(signal, tau=tau, window=window, steps=steps)
    if recipe is not None and (model is not None or data):
        raise UserError("give a recipe, or --model with --data, not both: a recipe says its own model and text")
    if model is not None and not data and not model.startswith("embedded:"):
        raise UserError("--model needs --data: the text to probe on (files or folders)")
    _check_tau(tau)
    workspace.check_writable()
    if recipe is not None:
        _, checkpoint = train_stage(workspace, recipe, device=device, announce=announce)
        source, config, base = str(checkpoint), Recipe.read(recipe), recipe.parent
    else:
        source = model or "embedded:reference"
        config, base = Recipe.read(EMBEDDED / "recipe.yaml"), EMBEDDED
    network, blocks, text = _model_and_text(
        workspace, source, data, config, base,
        block_size=block_size, max_tokens=max_tokens, device=device, announce=announce,
    )  # fmt: skip
    own = Path(source).name if data and model else config.name
    name = name or (own if signal == signals.DENSITY else f"{own}-{signal}")
    metadata = {"model": source if recipe is None else config.name, "data": text, "environment": environment()}
    with _bar("probing") as progress:
        options: dict[str, Any] = {"name": name, "metadata": metadata, "progress": progress}
        if signal == signals.DENSITY:
            table = probe(network, blocks, tau, **options)
        else:
            table = signals.measure(signal, network, blocks, window=window, steps=steps, **options)
    table.write(workspace.probe_dir(name))
    return table


def evaluate_stage(
    workspace: Workspace,
    *,
    model: str | None = None,
    data: list[str] | None = None,
    tau: float | None = None,
    tau_sweep: str | None = None,
    points: int | None = None,
    max_tokens: int | None = None,
    name: str | None = None,
    block_size: int = 512,
    device: str | None = None,
    announce: Announce = _silent,
) -> tuple[str, Evaluation, pd.DataFrame | None]:
    """Held-out NLL of a checkpoint; with ``tau_sweep`` also the trade-off figure, written to ``reports/<name>/``.

    Returns:
        The name; the evaluation at ``tau``, or with a sweep the one with open gates; the sweep's table.
    """
    from spkv_nas.evaluation.sweep import evaluate, parse_taus, sweep_table
    from spkv_nas.evaluation.sweep import tau_sweep as sweep_taus

    _quiet()
    source = model or "embedded:reference"
    embedded = source.startswith("embedded:")
    config = Recipe.read(EMBEDDED / "recipe.yaml")
    if not embedded and not data:
        raise UserError("--model needs --data: the text to evaluate on (files or folders)")
    if tau is not None and tau_sweep is not None:
        raise UserError("give --tau for one threshold or --tau-sweep for many, not both")
    if points is not None and tau_sweep is None:
        raise UserError("--points goes with --tau-sweep LOW..HIGH")
    _check_tau(tau)
    taus = None if tau_sweep is None else parse_taus(tau_sweep, points)
    workspace.check_writable()
    network, blocks, text = _model_and_text(
        workspace, source, data, config, EMBEDDED,
        block_size=block_size, max_tokens=max_tokens, device=device, announce=announce,
    )  # fmt: skip
    name = name or (config.name if embedded else Path(source).resolve().name)
    with _bar("evaluating") as progress:
        if taus is None:
            return name, evaluate(network, blocks, tau, progress=progress), None
        sweep = sweep_taus(network, blocks, taus, progress=progress)
    rows = sweep_table(sweep)
    summary = {
        "model": source,
        "data": text,
        "block_size": blocks.block_size,
        "num_tokens": int(sweep[0].nll.num_tokens.sum()),
        "num_documents": int((sweep[0].nll.num_tokens > 0).sum()),
        "environment": environment(),
    }
    _write_sweep(workspace.report_dir(name), rows, summary)
    return name, sweep[0], rows


def _write_sweep(folder: Path, rows: pd.DataFrame, summary: dict[str, Any]) -> None:
    """``tau-sweep.csv``, its origin in ``tau-sweep.yaml``, and the figure."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.result_charts import tau_sweep_chart

    write_atomic(folder / "tau-sweep.csv", rows.to_csv(index=False, float_format="%.6g"))
    write_atomic(folder / "tau-sweep.yaml", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True))
    save_chart(folder, tau_sweep_chart(rows))


def score_stage(
    workspace: Workspace,
    layout_files: list[Path] | None = None,
    *,
    model: str | None = None,
    data: list[str] | None = None,
    max_tokens: int | None = None,
    probe: str | None = None,
    name: str | None = None,
    block_size: int = 512,
    device: str | None = None,
    announce: Announce = _silent,
) -> tuple[str, pd.DataFrame]:
    """Zero-shot NLL of layouts on a checkpoint, written to ``reports/<name>/zero-shot.csv``; name and table."""
    from spkv_nas.evaluation.zero_shot import cache_folder, score_table, zero_shot
    from spkv_nas.proposal.coverage import coverage
    from spkv_nas.proposal.propose import at_layouts_tau

    _quiet()
    source = model or "embedded:dense"
    embedded = source.startswith("embedded:")
    config = Recipe.read(EMBEDDED / "recipe.yaml")
    if not embedded and not data:
        raise UserError("--model needs --data: the text to score on (files or folders)")
    table = None if probe is None else find_table(workspace, probe)
    own = config.name if embedded else Path(source).resolve().name
    name = name or (own if table is None else table.name)
    layouts = find_layouts(workspace, name, layout_files)
    covered = {}
    if table is not None:
        table = at_layouts_tau(table, layouts)
        covered = {key: coverage(table, layout) for key, layout in layouts.items()}
    workspace.check_writable()
    network, blocks, text = _model_and_text(
        workspace, source, data, config, EMBEDDED,
        block_size=block_size, max_tokens=max_tokens, device=device, announce=announce,
    )  # fmt: skip
    cache = cache_folder(workspace.run_dir(name) / "zero-shot", network, source, blocks)
    with _bar("scoring") as progress:
        full, *scores = zero_shot(network, [None, *layouts.values()], blocks, cache=cache, progress=progress)
    rows = score_table(layouts, dict(zip(layouts, scores, strict=True)), full, covered)
    summary = {
        "model": source,
        "data": text,
        "block_size": blocks.block_size,
        "num_tokens": int(full.num_tokens.sum()),
        "num_documents": int((full.num_tokens > 0).sum()),
        "probe": None if table is None else table.name,
        "environment": environment(),
    }
    folder = workspace.report_dir(name)
    write_atomic(folder / "zero-shot.csv", rows.to_csv(index=False, float_format="%.6g"))
    write_atomic(folder / "zero-shot.yaml", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True))
    return name, rows


def generate_stage(
    prompt: str,
    *,
    model: str | None = None,
    tau: float | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str | None = None,
    stream: Announce = _silent,
    announce: Announce = _silent,
) -> Generation:
    """Continue a prompt with a checkpoint; ``stream`` gets the text as it comes."""
    from spkv_nas.model.checkpoint import load
    from spkv_nas.model.generation import generate

    _quiet()
    _check_tau(tau)
    source = model or "embedded:reference"
    announce(f"loading {source}")
    network, tokenizer = load(source)
    network.to(_device(device))
    return generate(
        network, tokenizer, prompt, max_new_tokens=max_new_tokens, tau=tau, temperature=temperature, top_p=top_p,
        seed=seed, stream=stream,
    )  # fmt: skip


def palindrome_stage(
    workspace: Workspace,
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    name: str = "palindrome",
    device: str | None = None,
    announce: Announce = _silent,
) -> pd.DataFrame:
    """Train the paper's palindrome comparison and write it to ``reports/<name>/``; its table."""
    from spkv_nas.report.plot import save_chart
    from spkv_nas.report.training_charts import palindrome_charts
    from spkv_nas.training.palindrome.results import curve_table, result_table, write_results
    from spkv_nas.training.palindrome.run import PalindromeSettings, compare
    from spkv_nas.training.palindrome.task import Palindromes

    _quiet()
    workspace.check_writable()
    given = {"steps": steps, "batch_size": batch_size, "seed": seed}
    settings = PalindromeSettings(**{key: value for key, value in given.items() if value is not None})
    finished = compare(settings, workspace.run_dir(name), device=_device(device), announce=announce)
    folder = workspace.report_dir(name)
    write_results(folder, settings, finished)
    save_chart(folder, palindrome_charts(curve_table(finished), Palindromes(0).chance_nll))
    return result_table(settings, finished)


def scaling_stage(
    workspace: Workspace, runs_file: Path | None = None, *, name: str | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Fit the scaling law to runs (the paper's by default); written with its figure to ``reports/<name>/``.

    Returns:
        The name, and one summary per variant.
    """
    from spkv_nas.base.assets import PAPER_TABLE
    from spkv_nas.cost.scaling_law import fit_runs, read_runs, summary
    from spkv_nas.report.cost_charts import scaling_chart
    from spkv_nas.report.plot import save_chart

    runs = read_runs(runs_file or PAPER_TABLE)
    laws = fit_runs(runs)
    fits = summary(runs, laws)
    name = name or (PAPER if runs_file is None else runs_file.stem)
    workspace.check_writable()
    content = {"source": PAPER if runs_file is None else str(runs_file), "fits": fits, "environment": environment()}
    folder = workspace.report_dir(name)
    write_atomic(folder / "scaling.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    save_chart(folder, scaling_chart(runs, laws))
    return name, fits


def propose_stage(
    workspace: Workspace,
    probe: str,
    budget: int | str | None = None,
    *,
    tau: str | None = None,
    window: int | None = None,
    num_random: int = 3,
    seed: int = 0,
    demand: Demand | None = None,
) -> tuple[DensityTable, dict[str, Layout], pd.DataFrame, Certainty | None]:
    """Layouts for a budget, their coverage and, if the probe's documents are known, how sure they are.

    Written to ``layouts/<name>/``. With ``demand``, among them the layout that it asks for.
    """
    from spkv_nas.proposal.answer import write_proposal
    from spkv_nas.proposal.constraints import solve
    from spkv_nas.proposal.propose import propose, resolve_tau
    from spkv_nas.proposal.requirements import SOLVED, Demand
    from spkv_nas.proposal.stability import Certainty, bootstrap

    demand = demand or Demand()
    table = find_table(workspace, probe)
    limit = demand.limit(table, budget, window)
    table = resolve_tau(table, tau, limit.heads(table))
    solved: dict[str, Layout] = {}
    if demand.is_solved:
        layout = solve(
            table, limit.budget, demand.constraints, limit.weights, robust=demand.robust, window=window
        )  # fmt: skip
        solved[layout.strategy] = layout
    heads = next(iter(solved.values())).num_global if limit.weights is not None else limit.heads(table)
    layouts = propose(table, heads, window=window, seed=seed, num_random=num_random) | solved
    resampled = bootstrap(table)
    certainty = None if resampled is None else Certainty.of(resampled, layouts, heads)
    if resampled is not None and certainty is not None:
        for name in solved:
            with _bar("resampling") as progress:
                certainty.probability[name] = demand.probability(resampled, limit, progress=progress)
    folder = workspace.layout_dir(table.name)
    rows = write_proposal(folder, table, layouts, heads, resampled)
    if certainty is not None:
        write_atomic(folder / "heads.csv", certainty.heads(table).to_csv(index=False, float_format="%.6g"))
    else:
        (folder / "heads.csv").unlink(missing_ok=True)
    for stale in (*folder.glob("random-*.yaml"), *(folder / f"{name}.yaml" for name in SOLVED)):
        if stale.stem not in layouts:
            stale.unlink(missing_ok=True)
    return table, layouts, rows, certainty


def train_hybrid_stage(
    workspace: Workspace,
    probe: str,
    layout_files: list[Path] | None = None,
    *,
    recipe: Path | None = None,
    num_seeds: int = 1,
    device: str | None = None,
    announce: Announce = _silent,
) -> tuple[pd.DataFrame, dict[str, dict[str, Any] | None]]:
    """Retrain layouts (all of the workspace's by default); the comparison and its rank correlations by measure."""
    from spkv_nas.proposal.propose import at_layouts_tau

    table = find_table(workspace, probe)
    layouts = find_layouts(workspace, table.name, layout_files)
    table = at_layouts_tau(table, layouts)
    path = recipe or EMBEDDED / "demo.yaml"
    parsed = Recipe.read(path)
    from spkv_nas.training.hybrids import train_hybrids

    _quiet()
    if parsed.gates.start_from is None:
        for line in parsed.warnings():
            announce(f"warning: {line}")
    compared = train_hybrids(
        parsed, layouts, table, workspace, base=path.parent, num_seeds=num_seeds, device=device, announce=announce
    )
    return compared.rows, compared.correlations


def ablate_stage(
    workspace: Workspace, file: Path | None, *, device: str | None = None, announce: Announce = _silent
) -> tuple[str, pd.DataFrame]:
    """Train the rows of a file of ablations, by default the embedded ones; its name, and the table."""
    from spkv_nas.training.ablation import ablate

    _quiet()
    return ablate(file or EMBEDDED / "ablations.yaml", workspace, device=device, announce=announce)


def report_stage(workspace: Workspace, probe: str) -> Path:
    """Write the report of what the workspace holds under the probe's name; the page."""
    from spkv_nas.artifacts.comparison import read_comparison
    from spkv_nas.artifacts.search_table import read_search
    from spkv_nas.proposal.agreement import read_agreement
    from spkv_nas.proposal.propose import at_layouts_tau
    from spkv_nas.report.page import write_report

    table = find_table(workspace, probe)
    layouts = find_layouts(workspace, table.name, None)
    folder = workspace.report_dir(table.name)
    comparison = folder / "comparison.csv"
    record = folder / "comparison.yaml"
    agreement = folder / "agreement.csv"
    search = folder / "search.csv"
    return write_report(
        folder,
        table=at_layouts_tau(table, layouts),
        layouts=layouts,
        comparison=read_comparison(comparison) if comparison.is_file() else None,
        record=read_yaml(record, "comparison") if record.is_file() else None,
        agreement=read_agreement(agreement) if agreement.is_file() else None,
        search=read_search(search) if search.is_file() else None,
    )


def find_table(workspace: Workspace, probe: str) -> DensityTable:
    """A density table by name (``probes/<name>/``) or file; a ``.tsv`` has other scores in place of densities."""
    if probe.endswith(".csv"):
        return DensityTable.read(Path(probe))
    if probe.endswith(".tsv"):
        from spkv_nas.proposal.foreign_formats import read_score_table

        return read_score_table(Path(probe))
    folder = workspace.probe_dir(probe)
    if not (folder / "density.csv").is_file():
        raise UserError(
            f"no density table '{probe}' in {workspace.root / 'probes'}\n"
            "run spkv-nas probe first, or give --probe FILE.csv"
        )
    return DensityTable.read(folder)


def find_layouts(workspace: Workspace, name: str, files: list[Path] | None) -> dict[str, Layout]:
    """Layouts by strategy from files, or all of ``layouts/<name>/``."""
    paths = files or sorted(workspace.layout_dir(name).glob("*.yaml"))
    if not paths:
        raise UserError(f"no layouts in {workspace.layout_dir(name)}\nrun spkv-nas propose first, or name layout files")
    layouts: dict[str, Layout] = {}
    for path in paths:
        layout = Layout.read(path)
        key = layout.strategy if layout.strategy not in layouts else path.stem
        if key in layouts:
            raise UserError(f"two layouts are called '{key}': give them different names (the key 'strategy')")
        layouts[key] = layout
    return layouts


def _model_and_text(
    workspace: Workspace,
    source: str,
    data: list[str] | None,
    recipe: Recipe,
    base: Path,
    *,
    block_size: int,
    max_tokens: int | None = None,
    device: str | None,
    announce: Announce,
) -> tuple[PreTrainedModel, TokenBlocks, Any]:
    """A model on its device, the blocks of ``data`` or else of the recipe's held-out text, and what text that is."""
    from spkv_nas.data.blocks import build_blocks
    from spkv_nas.data.sources import documents
    from spkv_nas.data.splits import load_heldout
    from spkv_nas.model.checkpoint import load

    length = block_size if data else recipe.data.block_size
    if max_tokens is not None and max_tokens < length:
        raise UserError(f"--max-tokens {max_tokens} is less than one block of {length} tokens")
    announce(f"loading {source}")
    network, tokenizer = load(source)
    network.to(_device(device))
    text: Any = data
    if data:
        blocks = build_blocks(documents(data, Path()), tokenizer, length, max_tokens)
    else:
        announce("reading and tokenising held-out text")
        blocks = load_heldout(recipe.data, tokenizer, workspace.run_dir(recipe.name) / "blocks", base)
        text = recipe.data.model_dump(mode="json")
    return network, blocks if max_tokens is None else blocks.take(max_tokens // length), text


def _check_tau(tau: float | None) -> None:
    if tau is not None and not 0.0 <= tau <= 1.0:
        raise UserError(f"--tau must lie in [0, 1]; found {tau:g}")


def _quiet() -> None:
    """Switch off the bars with which transformers reports every file that it reads or writes, and its other voices."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if process_index():
        logging.set_verbosity_error()


def _device(device: str | None) -> str:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no CUDA device here")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr while the block runs; yields what tells it (done, total)."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
