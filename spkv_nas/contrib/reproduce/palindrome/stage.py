"""Palindrome comparison: train full attention, a sliding window and SP-KV from scratch to reverse a list.

SP-KV paper, appendix "Palindrome reversal with long instruction gap", scaled down for a CPU: 0.1 M parameters instead
of 2.25 B, and 32 sequences per step instead of 64. The sliding window must fail: its two layers reach 62 tokens back,
and the instruction has 65. Gates are soft throughout. Their bias starts at 2 (u = 0.88) instead of the paper's 5
(u = 0.993): an open gate passes only 1 - u of its gradient, and 500 steps leave little time to close it. Query heads do
not share KV heads: a shared gate must keep what any of its query heads needs, and closes for some seeds only
(``reports/LOG.md``).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from spkv_nas.artifacts import comparison, gate_config, layout
from spkv_nas.base import console, files, manifest, records, replace, tables, version
from spkv_nas.base.device import choose_device
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.contrib.reproduce.palindrome.options import BATCH_SIZE, NAME, STEPS, PalindromeOptions
from spkv_nas.contrib.reproduce.palindrome.task import (
    VOCABULARY,
    Measures,
    Palindromes,
    take_measures,
)
from spkv_nas.model import attach, attention, checkpoint, windows
from spkv_nas.report import chart, plot
from spkv_nas.stages.commands import Result
from spkv_nas.training.branch_config import GateSchedule, GatesConfig, LearningRateSchedule
from spkv_nas.training.run_files import remove_checkpoints, run_lock
from spkv_nas.training.trainer import SPKVTrainer

SLIDING_WINDOW = "sliding-window"
VARIANTS = (comparison.FULL_ATTENTION, SLIDING_WINDOW, comparison.SP_KV)
SAVE_STEPS = 100
_CURVE = (
    tables.Column("variant"),
    tables.Column("step", "whole"),
    tables.Column("loss", "number"),
    tables.Column("mean_utility", "number", gaps=True),
    tables.Column("density", "number", gaps=True),
)
_FILES = ("run.json", "curve.csv")
CURVE_COLUMNS = tuple(column.name for column in _CURVE)
COLUMNS = ("variant", "nll", "hard_nll", "mean_utility", "density", "steps", "seconds")
_STYLES: tuple[tuple[chart.Tone, chart.Dash], ...] = (
    ("ink", "solid"),
    ("second", "dashed"),
    ("accent", "dashdot"),
)


@dataclass(frozen=True)
class PalindromeSettings:
    """Settings that determine the result."""

    steps: int = STEPS
    batch_size: int = BATCH_SIZE
    seed: int = 0
    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    initializer_range: float = 0.06  # with transformers' 0.02, the same loss takes twice the steps
    learning_rate: float = 5e-3
    warmup_steps: int = 50
    final_learning_rate: float = 0.01  # share of the peak
    weight_decay: float = 0.1
    window: int = 32
    bias: float = 2.0
    learning_rate_multiplier: float = 5.0  # of the predictors
    tau: float = 0.5
    num_heldout: int = 512  # sequences

    @property
    def content_hash(self) -> str:
        """Hash all settings: 12 hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class PalindromeRun(Measures):
    """Results of a finished variant, one of ``VARIANTS``, with its training time and its log of ``CURVE_COLUMNS``."""

    variant: str
    seconds: float
    num_parameters: int
    hardware: str
    curve: pd.DataFrame

    @classmethod
    def read(cls, final: Path) -> "PalindromeRun":
        """Read the results of ``train_variant``. Raises ``UserError`` if the folder is damaged."""
        manifest.check_manifest(final)
        record = files.read_json(final / "run.json", "run record")
        curve = tables.read_table(final / "curve.csv", "training curve", _CURVE)
        record["curve"] = curve.reset_index(drop=True)
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class PalindromeResult:
    """Table of the palindrome comparison, and the folder with table, curves and figure."""

    rows: pd.DataFrame
    folder: Path


def run(options: PalindromeOptions, reporter: Reporter = SILENT) -> Result:
    """Train every variant on the same sequences in the same order, reusing finished ones, to ``reports/<name>/``."""
    options.folders.check_writable()
    settings = PalindromeSettings(
        steps=options.steps or STEPS,
        batch_size=options.batch_size or BATCH_SIZE,
        seed=options.seed or 0,
    )
    name = options.name or NAME
    device = choose_device(options.device)
    # Train the three models
    runs = options.folders.run_dir(name)
    folders = {variant: runs / f"{variant}-{settings.content_hash}" for variant in VARIANTS}
    reporter.reused(sum(map(is_finished, folders.values())), len(VARIANTS), "runs")
    finished = []
    for number, (variant, folder) in enumerate(folders.items(), 1):
        if not is_finished(folder):
            reporter.announce(f"{variant} ({number} of {len(VARIANTS)})")
        finished.append(train_variant(settings, variant, folder, device=device, reporter=reporter))
    # Write table, curves and figure
    rows = result_table(settings, finished)
    curves = pd.concat([run.curve for run in finished])
    report = options.folders.report_dir(name)
    with replace.replacing(report) as new:
        tables.write_csv(new / "palindrome.csv", rows)
        tables.write_csv(new / "palindrome-curves.csv", curves)
        records.write_record(new / "palindrome.yaml", _background(settings, finished))
    plot.save_chart(report, palindrome_charts(curves, Palindromes(0).chance_nll))
    return Result(PalindromeResult(rows, report), show)


def show(result: PalindromeResult) -> None:
    """Print NLL, utility, density and training time of each kind of attention."""
    grid = console.Table(
        "attention",
        "NLL",
        "hard NLL",
        "mean utility",
        "density %",
        "seconds",
        title="nats per output token",
    )
    for row in result.rows.itertuples():
        has_gates = row.hard_nll == row.hard_nll  # not NaN
        gate_cells = (f"{row.hard_nll:.4f}", f"{row.mean_utility:.3f}") if has_gates else ("-", "-")
        grid.add_row(
            row.variant,
            f"{row.nll:.4f}",
            *gate_cells,
            f"{100 * row.density:.1f}",
            f"{row.seconds:.0f}",
        )
    console.out.print(grid)
    console.print_path("figure", result.folder / "palindrome.png")


def train_variant(
    settings: PalindromeSettings,
    variant: str,
    folder: Path,
    *,
    device: str = "cpu",
    reporter: Reporter = SILENT,
) -> PalindromeRun:
    """Train and evaluate one of ``VARIANTS``; an interrupted run resumes, a finished one is read."""
    if not is_finished(folder):
        with run_lock(folder, reporter.announce):
            if not is_finished(folder):
                _train(settings, variant, folder, device, reporter)
    remove_checkpoints(folder)
    return PalindromeRun.read(folder / "final")


def is_finished(folder: Path) -> bool:
    """Return True if a variant was trained and evaluated to the end."""
    return manifest.is_complete(folder / "final", _FILES)


def _train(
    settings: PalindromeSettings, variant: str, folder: Path, device: str, reporter: Reporter
) -> None:
    """Train and evaluate a variant, and write the subfolder ``final`` of ``folder``."""
    # Train
    model = new_model(settings, variant)
    sequences = Palindromes(settings.steps * settings.batch_size, settings.seed)
    decay_steps = max(1, settings.steps - settings.warmup_steps)
    trainer = SPKVTrainer(
        model=model,
        args=_arguments(settings, folder, device),
        train_dataset=sequences,
        schedule=LearningRateSchedule(
            settings.steps, settings.warmup_steps, decay_steps, settings.final_learning_rate
        ),
        gates=GateSchedule(settings.steps, soft_fraction=1.0)
        if variant == comparison.SP_KV
        else None,
        gate_options=GatesConfig(
            tau=settings.tau, learning_rate_multiplier=settings.learning_rate_multiplier
        ),
        title=variant,
        reporter=reporter,
        callbacks=[UtilityCallback()],
    )
    trainer.train_or_resume()
    # Evaluate on held-out sequences
    curve = pd.DataFrame([entry for entry in trainer.state.log_history if "loss" in entry])
    heldout = Palindromes(settings.num_heldout, settings.seed, heldout=True)
    record = {
        "variant": variant,
        **asdict(take_measures(model, heldout, settings.tau)),
        "seconds": sequences.length
        * len(sequences)
        * float((1.0 / curve["tokens_per_second"]).mean()),
        "num_parameters": model.num_parameters(),
        "hardware": (
            f"CPU ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads"
            if device == "cpu"
            else torch.cuda.get_device_name()
        ),
        "settings": asdict(settings),
        "environment": version.environment(),
    }
    # Write results and model
    with replace.new_folder(folder / "final") as new:
        tables.write_csv(
            new / "curve.csv", curve.assign(variant=variant).reindex(columns=list(CURVE_COLUMNS))
        )
        files.write_json(new / "run.json", record)
        checkpoint.save(model, None, new)


def new_model(settings: PalindromeSettings, variant: str) -> PreTrainedModel:
    """Initialize a Llama with the same random weights for every variant, and apply the variant's attention."""
    # Model
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(VOCABULARY),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=Palindromes(0).length,
        initializer_range=settings.initializer_range,
        bos_token_id=None,
        eos_token_id=None,
    )
    set_seed(settings.seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Attention
    if variant == SLIDING_WINDOW:
        heads = ("L" * settings.num_kv_heads,) * settings.num_layers
        windows.apply_layout(model, layout.Layout(heads, window=settings.window))
    elif variant == comparison.SP_KV:
        gates = gate_config.GateConfig(window=settings.window, bias=settings.bias, tau=settings.tau)
        attach.attach_gates(model, gates, seed=settings.seed)
    return model


class UtilityCallback(TrainerCallback):
    """Callback that adds the mean utility of each logged step to the log history."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the mean utility of each layer in its latest pass."""
        means: dict[int, torch.Tensor] = {}

        def keep_mean(layer: int, logits: torch.Tensor, _is_text: torch.Tensor) -> None:
            means[layer] = logits.detach().sigmoid().mean()

        self._means = means
        self._watch = attention.watch_logits(kwargs["model"], keep_mean)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the mean utility to the last log entry."""
        if self._means:
            means = torch.stack(list(self._means.values()))
            state.log_history[-1]["mean_utility"] = float(means.mean())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach from the model."""
        self._watch.close()


def _arguments(settings: PalindromeSettings, folder: Path, device: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=1.0,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        logging_steps=max(1, settings.steps // 50),
        logging_nan_inf_filter=False,
        seed=settings.seed,
        use_cpu=device == "cpu",
        dataloader_pin_memory=device != "cpu",
        report_to=[],
        disable_tqdm=True,  # replaced by TokenProgressCallback
    )


def result_table(settings: PalindromeSettings, finished: Sequence[PalindromeRun]) -> pd.DataFrame:
    """Tabulate the variants, columns ``COLUMNS``, with density 1 of full attention and 0 of the sliding window."""
    rows = [{**vars(run), "steps": settings.steps} for run in finished]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    without_gates = table["variant"].map({comparison.FULL_ATTENTION: 1.0, SLIDING_WINDOW: 0.0})
    table["density"] = table["density"].fillna(without_gates)
    return table


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


def palindrome_charts(curves: pd.DataFrame, chance_nll: float) -> chart.Panels:
    """Return training loss by variant, and mean utility and density of the gates, by step.

    SP-KV paper, appendix "Palindrome reversal with long instruction gap". ``curves`` has the columns of
    ``CURVE_COLUMNS``; ``chance_nll`` is the NLL, in nats per output token, of a model that sees nothing of the list.
    """
    steps = chart.round_axis("Step", 0, float(curves["step"].max()), exact=True)

    def line(
        rows: pd.DataFrame,
        column: str,
        label: str,
        tone: chart.Tone = "accent",
        dash: chart.Dash = "solid",
    ) -> chart.Line:
        return chart.Line(
            chart.numbers(rows["step"]), chart.numbers(rows[column]), label, tone, dash, 2.2
        )

    # Loss of each variant, and gates
    chance = chart.Rule(
        chance_nll, f"chance {chance_nll:.2f}", vertical=False, tone="muted", dash="dotted"
    )
    by_variant = zip(curves.groupby("variant", sort=False), _STYLES, strict=False)
    losses = (line(curve, "loss", str(variant), *style) for (variant, curve), style in by_variant)
    gated = curves.dropna(subset=["mean_utility"])
    gates = (
        line(gated, "mean_utility", "mean utility"),
        line(gated, "density", "density", "muted", "dotted"),
    )
    charts: tuple[tuple[str, str, float, tuple[chart.Mark, ...]], ...] = (
        ("loss", "Training loss, nats per output token", 2 * chance_nll, (chance, *losses)),
        ("gates", "SP-KV gates, mean over heads and tokens", 1.0, gates),
    )
    panels = [
        chart.Chart(f"palindrome-{name}", title, steps, chart.round_axis(title, 0, high), marks)
        for name, title, high, marks in charts
    ]
    return chart.Panels("palindrome", tuple(panels))
