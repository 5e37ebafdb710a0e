"""Estimate the cost of the workflow's stages, as commands run them by default, from the model's config alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spkv_nas.artifacts import defaults, gate_config, shape
from spkv_nas.base import console, limits, progress, units
from spkv_nas.base.device import choose_device, choose_dtype, dtype_name
from spkv_nas.base.memory import available_bytes, chunk_bytes
from spkv_nas.cost.formulas import BFLOAT16
from spkv_nas.cost.stage_costs import Site, StageCost, Stages
from spkv_nas.data.config import DataConfig
from spkv_nas.evaluation.micro_batch import BATCH_SIZE
from spkv_nas.model.checkpoint import load_tokenizer, read_gates, read_size, saved_dtype
from spkv_nas.probing import signals
from spkv_nas.proposal.budget import MEMORIES
from spkv_nas.stages.options import REFERENCE, auto, probe
from spkv_nas.stages.subject import Subject
from spkv_nas.training import first_recipe, step_cost


@dataclass(frozen=True)
class Forecast:
    """Estimated cost of stages."""

    name: str  # name of the model or the recipe
    size: shape.ModelSize  # size of the model, without gate predictors
    num_predictor_parameters: int  # parameters of the gates that the model has or will get
    site: Site  # hardware that the stages run on
    stages: tuple[StageCost, ...]  # cost of each stage, in the order of the workflow
    remarks: tuple[str, ...]  # assumptions behind the numbers

    @classmethod
    def of(cls, name: str, stages: Stages, costs: Iterable[StageCost], *remarks: str) -> "Forecast":
        """Assemble a forecast of a model and site, with a remark on the memory that it assumes."""
        site = stages.site
        memory = f"memory: {site.memory / 1e9:.4g} GB on {site.name}, 10 % of it reserved for driver and allocator"
        return cls(
            name,
            stages.size,
            stages.num_predictor_parameters,
            site,
            tuple(costs),
            (memory, *remarks),
        )


def plan_auto(options: auto.AutoOptions, reporter: progress.Reporter = progress.SILENT) -> Forecast:
    """Estimate the cost of ``auto``: the probe, and the comparison of memory budgets with the dense model."""
    plan = plan_probe(options.probe, reporter, compares=options.max_tokens or auto.HELD_OUT_TOKENS)
    retraining = (
        []
        if options.retrain is None
        else [f"not counted: --retrain {options.retrain}, and its verdict"]
    )
    return replace(plan, remarks=(*plan.remarks, *retraining))


def plan_probe(
    options: probe.ProbeOptions, reporter: progress.Reporter, compares: int = 0
) -> Forecast:
    """Estimate the cost of ``probe`` without a recipe and a bisection of ``compares`` tokens; errors as ``probe``."""
    signal = probe.chosen_signal(options)
    subject = Subject.of(options, REFERENCE, "probe on")
    device = choose_device(options.device)
    data = subject.recipe.data
    base = subject.base
    if options.data:
        length = subject.length
        data = DataConfig(sources=[*options.data], block_size=length)
        base = Path()
    # Describe the model and this machine
    size = read_size(subject.source)
    gates = read_gates(subject.source)
    memory = available_bytes(device)
    num_bytes = item_bytes(subject.source, Site(device, memory), options.dtype)
    reporter.announce("timing a matrix product")
    speed = step_cost.EFFICIENCY * step_cost.matmul_speed(device, bfloat16=num_bytes == BFLOAT16)
    # Count the text
    learns = gates is None and signal.needs_gates
    num_tokens = limits.MAX_WHOLE  # above every --max-tokens
    if options.max_tokens is None:
        reporter.announce("counting the tokens of the text")
        text = first_recipe.count_text(data.sources, base, load_tokenizer(subject.source))
        num_tokens = text.heldout(data) if learns or not options.data else text.tokens
    # Count the stages
    stages = Stages(
        size,
        gates
        or gate_config.GateConfig(
            window=options.window or gate_config.suitable_window(data.block_size)
        ),
        Site(device, memory, speed, is_cpu=device == "cpu", chunk=chunk_bytes(device)),
        data.block_size,
        BATCH_SIZE,
        num_bytes,
    )
    learning = [gate_training(stages, options.steps)] if learns else []
    limit = options.max_tokens or _most_tokens(signal, num_tokens)
    stage_costs = [*learning, signal.cost(stages, min(limit, num_tokens))]
    if "ablation_tokens" in signal.options() and options.ablation_tokens != 0:
        stage_costs.append(
            _validating(
                stages, min(options.ablation_tokens or defaults.ABLATION_TOKENS, num_tokens)
            )
        )
    if compares:
        looks = 2 * len(MEMORIES).bit_length()
        stage_costs.append(
            stages.measure("compare budgets, at most", min(compares, num_tokens), 1 + looks)
        )
    about_time = f"time: computed from FLOPs at {speed:.2g} FLOP/s, half the measured speed of a matrix product"
    return Forecast.of(subject.name, stages, stage_costs, about_time)


def gate_training(stages: Stages, steps: int | None) -> StageCost:
    """Return the cost of training gates on a frozen model."""
    return stages.learn_gates(
        "train gates, frozen model", steps or defaults.PRICED_STEPS, defaults.LEARNING_TOKENS
    )


def measuring_stages(stages: Stages, tokens: int) -> Iterator[StageCost]:
    """Yield the stages that need no training, on ``tokens`` tokens of text."""
    yield signals.DENSITY.cost(stages, tokens)
    yield _validating(stages, min(defaults.ABLATION_TOKENS, tokens))
    for signal in signals.SIGNALS:
        if signal is not signals.DENSITY:
            yield signal.cost(stages, _most_tokens(signal, tokens))
    yield stages.measure("evaluate", tokens, gated=True)


def _most_tokens(signal: signals.Signal, tokens: int) -> int:
    return min(defaults.SCORING_TOKENS, tokens) if signal.computes_logits else tokens


def _validating(stages: Stages, tokens: int) -> StageCost:
    """Return the cost of the single-head gains that validate a table."""
    return stages.measure(
        "validate the ranking", tokens, signals.ablation_passes(stages.size.heads.grid), shares=1.0
    )


def item_bytes(source: str, site: Site, dtype: str | None) -> int:
    """Return the bytes per number that a checkpoint is measured in; requested GPUs support every dtype."""
    checkpoint_dtype = saved_dtype(source)
    if dtype is None and checkpoint_dtype is not None:
        dtype = dtype_name(
            checkpoint_dtype
            if site.speed is not None
            else choose_dtype(site.name, checkpoint_dtype)
        )
    return units.ITEM_BYTES[dtype or "float32"]


def show(result: Forecast) -> None:
    """Print memory, tokens, FLOPs and time of every stage, and what to change where one does not fit."""
    # Model
    size = result.size
    heads = result.size.heads
    console.out.print(
        f"[bold]{console.escape(result.name)}[/bold]: {size.num_parameters:,} parameters, "
        f"{heads.words}; {result.num_predictor_parameters:,} of predictors"
    )
    # Table of stages
    site = result.site
    fits_title = f"fits in\n{result.site.memory / 1e9:.3g} GB"
    where = site.name if site.devices == 1 else f"{site.name}, training on {site.devices}"
    grid = console.Table(
        "", "memory", "tokens", "FLOPs", "time", fits_title, title=f"cost of each stage on {where}"
    )
    for stage in result.stages:
        batching = f"\n  [dim]{console.escape(stage.batching)}[/dim]" if stage.batching else ""
        tokens, flops = (
            (f"{stage.tokens:,}", units.format_flops(stage.flops)) if stage.tokens else ("-", "-")
        )
        answer = "yes" if stage.fits else "no"
        memory = units.format_bytes(round(stage.memory.total))
        grid.add_row(
            console.escape(stage.name) + batching, memory, tokens, flops, _time(stage), answer
        )
    console.out.print(grid)
    for stage in result.stages:
        if stage.remedy:
            console.caution(f"does not fit: {stage.name}\n  {stage.remedy}")
    console.say("\n".join(result.remarks))


def _time(stage: StageCost) -> str:
    """Format a time from FLOPs, which means nothing below a second for a stage, or a millisecond for a token."""
    if stage.seconds is None:
        return "-"
    if stage.tokens == 1:
        return "< 1 ms" if stage.seconds < 1e-3 else f"at least {1e3 * stage.seconds:.3g} ms"
    return "< 1 s" if stage.seconds < 1 else units.format_seconds(stage.seconds)


def document(result: Forecast) -> dict[str, Any]:
    """Return memory, tokens, FLOPs and time of every stage."""
    stages = [
        {**vars(stage), "bytes": stage.memory.total, "fits": stage.fits} for stage in result.stages
    ]
    return {**vars(result), "stages": stages}
