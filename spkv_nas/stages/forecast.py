"""Estimate the cost of the workflow's stages, as commands run them by default, from the model's config alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

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
        memory = (
            f"memory: {site.memory / 1e9:.4g} GB on {site.name}, "
            "10 % of it reserved for driver and allocator"
        )
        return cls(
            name=name,
            size=stages.size,
            num_predictor_parameters=stages.num_predictor_parameters,
            site=site,
            stages=tuple(costs),
            remarks=(memory, *remarks),
        )


def plan_auto(options: auto.AutoOptions, reporter: progress.Reporter = progress.SILENT) -> Forecast:
    """Estimate the cost of ``auto``: the probe, and the comparison of memory budgets with the dense model."""
    plan = plan_probe(options.probe, reporter, compares=options.max_tokens or auto.HELD_OUT_TOKENS)
    if options.retrain is None:
        return plan
    remark = f"not counted: --retrain {options.retrain}, and its verdict"
    return replace(plan, remarks=(*plan.remarks, remark))


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
    site = Site(device, available_bytes(device))
    num_bytes = item_bytes(subject.source, site, options.dtype)
    reporter.announce("timing a matrix product")
    speed = step_cost.EFFICIENCY * step_cost.matmul_speed(device, bfloat16=num_bytes == BFLOAT16)
    site = replace(site, speed=speed, is_cpu=device == "cpu", chunk=chunk_bytes(device))
    # Count the text
    learns = gates is None and signal.needs_gates
    num_tokens = limits.MAX_WHOLE  # above every --max-tokens
    if options.max_tokens is None:
        reporter.announce("counting the tokens of the text")
        text = first_recipe.count_text(data.sources, base, load_tokenizer(subject.source))
        num_tokens = text.heldout(data) if learns or not options.data else text.tokens
    # Count the stages
    if gates is None:
        window = options.window or gate_config.suitable_window(data.block_size)
        gates = gate_config.GateConfig(window=window)
    stages = Stages(size, gates, site, data.block_size, BATCH_SIZE, num_bytes)
    costs = _probing(stages, options, num_tokens, learns=learns)
    if compares:
        looks = 2 * len(MEMORIES).bit_length()
        compared = min(compares, num_tokens)
        costs.append(stages.measure("compare budgets, at most", compared, 1 + looks))
    about_time = (
        f"time: computed from FLOPs at {speed:.2g} FLOP/s, "
        "half the measured speed of a matrix product"
    )
    return Forecast.of(subject.name, stages, costs, about_time)


def _probing(
    stages: Stages, options: probe.ProbeOptions, num_tokens: int, *, learns: bool
) -> list[StageCost]:
    """Return the costs of ``probe`` on a text, which trains gates first if it ``learns``."""
    signal = probe.chosen_signal(options)
    costs = []
    if learns:
        costs.append(gate_training(stages, options.steps))
    limit = options.max_tokens or _most_tokens(signal, num_tokens)
    costs.append(signal.cost(stages, min(limit, num_tokens)))
    if "ablation_tokens" in signal.options() and options.ablation_tokens != 0:
        tokens = options.ablation_tokens or defaults.ABLATION_TOKENS
        costs.append(_validating(stages, min(tokens, num_tokens)))
    return costs


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
    passes = signals.ablation_passes(stages.size.heads.grid)
    return stages.measure("validate the ranking", tokens, passes, shares=1.0)


def item_bytes(source: str, site: Site, dtype: str | None) -> int:
    """Return the bytes per number that a checkpoint is measured in; requested GPUs support every dtype."""
    checkpoint_dtype = saved_dtype(source)
    if dtype is not None or checkpoint_dtype is None:
        return units.ITEM_BYTES[dtype or "float32"]
    if site.speed is None:  # this machine
        checkpoint_dtype = choose_dtype(site.name, checkpoint_dtype)
    return units.ITEM_BYTES[dtype_name(checkpoint_dtype)]


def show(result: Forecast) -> None:
    """Print memory, tokens, FLOPs and time of every stage, and what to change where one does not fit."""
    # Describe the model
    size = result.size
    console.out.print(
        f"[bold]{console.escape(result.name)}[/bold]: {size.num_parameters:,} parameters, "
        f"{size.heads.words}; {result.num_predictor_parameters:,} of predictors"
    )
    # Tabulate the stages
    site = result.site
    where = site.name if site.devices == 1 else f"{site.name}, training on {site.devices}"
    columns = ("", "memory", "tokens", "FLOPs", "time", f"fits in\n{site.memory / 1e9:.3g} GB")
    grid = console.Table(*columns, title=f"cost of each stage on {where}")
    for stage in result.stages:
        name = console.escape(stage.name)
        if stage.batching:
            name += f"\n  [dim]{console.escape(stage.batching)}[/dim]"
        grid.add_row(
            name,
            units.format_bytes(round(stage.memory.total)),
            f"{stage.tokens:,}" if stage.tokens else "-",
            units.format_flops(stage.flops) if stage.tokens else "-",
            _time(stage),
            "yes" if stage.fits else "no",
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


def document(result: Forecast) -> dict[str, object]:
    """Return memory, tokens, FLOPs and time of every stage."""
    stages = [
        {**vars(stage), "bytes": stage.memory.total, "fits": stage.fits} for stage in result.stages
    ]
    return {**vars(result), "stages": stages}
