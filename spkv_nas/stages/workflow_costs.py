"""Estimate what every stage of the workflow costs, from the config of a model or a recipe."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from spkv_nas.artifacts import gate_config, local_layers, shape
from spkv_nas.base import memory, progress, units
from spkv_nas.base.device import choose_device, training_precision
from spkv_nas.cost.stage_costs import Site, StageCost, Stages, Training, find_hardware
from spkv_nas.data.config import DataConfig
from spkv_nas.evaluation.micro_batch import BATCH_SIZE
from spkv_nas.model import checkpoint
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.stages import forecast, sized_model, subject
from spkv_nas.stages.context import choose_context
from spkv_nas.stages.options.plan import PlanOptions
from spkv_nas.training import first_recipe, run_plan, step_cost
from spkv_nas.training.branch_config import BranchConfig
from spkv_nas.training.recipe import DenseConfig, Recipe

# Enough for the largest blocks and batches of init
_ENOUGH = first_recipe.TextSize(documents=1000, tokens=10**9)
# Trainings, and whether they have gates
_BRANCHES = (("train the SP-KV reference", True), ("retrain a hybrid", False))
_UTILISATION = 0.4  # assumed share of a GPU's peak FLOP/s


@dataclass(frozen=True)
class _Workflow:
    """Stages of the workflow on a model."""

    name: str  # of the model or the recipe
    stages: Stages  # cost model
    num_tokens: int  # of held-out text
    costs: list[StageCost]
    remarks: tuple[str, ...] = ()


def plan_workflow(options: PlanOptions, *, reporter: progress.Reporter) -> forecast.Forecast:
    """Estimate the cost of the full workflow on a recipe or a model; ``UserError`` for a mixture of experts."""
    if options.is_recipe:
        workflow = _of_recipe(Path(options.subject), options, reporter)
    else:
        workflow = _of_model(options.subject, options, reporter)
    stages = workflow.stages
    context = choose_context(options.context, stages.size.positions, reporter)
    text = (
        f"text: {workflow.num_tokens:,} held-out tokens; everything but training runs on one device"
    )
    costs = [*workflow.costs, *_generated(stages, options, context)]
    remarks = (text, *workflow.remarks, _about_time(options))
    return forecast.Forecast.of(workflow.name, stages, costs, *remarks)


def _of_model(source: str, options: PlanOptions, reporter: progress.Reporter) -> _Workflow:
    """Measure a model, then train it by the recipe that ``init`` would draft."""
    size = checkpoint.read_size(source)
    gates = checkpoint.read_gates(source)
    length = options.block_size or subject.default_context(source)
    checkpoint.check_dense(size, source)
    site = _site(options)
    config = gates or gate_config.GateConfig(window=gate_config.suitable_window(length))
    item_bytes = forecast.item_bytes(source, site, options.dtype)
    stages = Stages(size, config, site, length, BATCH_SIZE, item_bytes)
    # Count the text
    data = DataConfig(sources=[*(options.data or ("stdlib",))])
    tokens = data.max_heldout_tokens
    text = _ENOUGH
    if options.data:
        reporter.announce("counting the tokens of the text")
        text = first_recipe.count_text(options.data, Path(), checkpoint.load_tokenizer(source))
        tokens = text.heldout(data)
    # Draft the recipe
    device = "cpu" if site.is_cpu else "cuda"
    draft = first_recipe.Draft.of("plan", source, ("stdlib",), size, text, device)
    steps = options.steps or draft.steps
    draft = replace(draft, steps=steps, block_size=options.block_size or draft.block_size)
    recipe = draft.recipe(Path())
    # Count the stages
    costs = []
    if gates is None:
        costs.append(forecast.gate_training(stages, options.steps))
    costs += forecast.measuring_stages(stages, tokens)
    schedule = _training(recipe, recipe.branch, size, site)
    training_stages = replace(stages, block_size=draft.block_size)
    for name, gated in _BRANCHES:
        costs.append(training_stages.train(name, schedule, gated=gated))
    remarks = (draft.remark(),)
    return _Workflow(sized_model.model_name(source), stages, tokens, costs, remarks)


def _of_recipe(file: Path, options: PlanOptions, reporter: progress.Reporter) -> _Workflow:
    """Train as a recipe says, then measure."""
    # Read the recipe and its model
    recipe = Recipe.read(file)
    site = _site(options)
    runs = options.folders.run_dir(recipe.name)
    planner = run_plan.Planner(recipe, file.parent, runs, announce=reporter.announce)
    size = planner.size
    checkpoint.check_dense(size, f"of recipe {file}")
    item = units.ITEM_BYTES[options.dtype or "float32"]  # the dtype that training saves
    gates = recipe.gates.of_model()
    stages = Stages(size, gates, site, recipe.data.block_size, BATCH_SIZE, item)
    # List its trainings
    phases: list[tuple[str, DenseConfig | BranchConfig, bool]]
    phases = [(name, recipe.branch, gated) for name, gated in _BRANCHES]
    if recipe.dense is not None:
        phases.insert(0, ("train the dense model", recipe.dense, False))
    costs = []
    for name, phase, gated in phases:
        training = _training(recipe, phase, size, site, gated=gated)
        costs.append(stages.train(name, training, gated=gated))
    tokens = planner.text.heldout(recipe.data)
    costs += forecast.measuring_stages(stages, tokens)
    return _Workflow(recipe.name, stages, tokens, costs)


def _generated(stages: Stages, options: PlanOptions, context: int) -> Iterator[StageCost]:
    """Yield generation with full attention and with a layout of the budget."""
    size = stages.size
    counts = size.heads.heads_per_layer
    heads = sum(counts)
    layers = local_layers.config_layers(size.native_windows or [None] * len(counts))
    candidates = local_layers.candidate_layers(layers)
    budget = parse_budget(options.budget, sum(counts[layer] for layer in candidates))
    full = f"generate at {context:,}"
    name = f"generate, {budget} of {heads} global"
    yield stages.generate(
        full, context, density=size.full_attention_share, window=size.sliding_window
    )
    yield stages.generate(name, context, density=budget / heads, window=stages.gates.window)


def _site(options: PlanOptions) -> Site:
    """Return the requested hardware, or this machine, of which only the memory is known."""
    if options.hardware is None:
        device = choose_device(options.device)
        return Site(
            name=device,
            memory=memory.available_bytes(device),
            devices=options.devices,
            is_cpu=device == "cpu",
            chunk=memory.chunk_bytes(device),
        )
    name, bandwidth, peak, num_bytes = find_hardware(options.hardware)
    return Site(
        name=name,
        memory=num_bytes,
        speed=_UTILISATION * peak,
        bandwidth=bandwidth,
        devices=options.devices,
        chunk=memory.chunk_bytes("cuda", num_bytes),
    )


def _training(
    recipe: Recipe,
    phase: DenseConfig | BranchConfig,
    size: shape.ModelSize,
    site: Site,
    *,
    gated: bool = False,
) -> Training:
    """Return how a phase of a recipe trains; on requested GPUs in bfloat16 where the recipe allows it."""
    precision: str = recipe.precision
    if precision == "auto":
        precision = "bfloat16" if site.speed is not None else training_precision(site.name)
    is_bfloat16 = precision == "bfloat16"
    return step_cost.how_trained(recipe, phase, size, bfloat16=is_bfloat16, gated=gated)


def _about_time(options: PlanOptions) -> str:
    """Return a sentence on what the estimated times assume."""
    if options.hardware is None:
        return (
            "time: unknown for this machine; choose a GPU with --hardware, "
            "or time training steps (init, --dry-run)"
        )
    peak = find_hardware(options.hardware).peak / 1e12
    return (
        f"time: assumes {_UTILISATION:.0%} of the {peak:,.0f} TFLOP/s peak in bfloat16, "
        "which small models do not reach; for a generated token, "
        "the least time that reading weights and cache takes"
    )
