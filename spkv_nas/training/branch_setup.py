"""Setup of a branch: its model with a layout or gates applied, its LoRA adapters (peft), and its training schedules.

Adapters are put into a model with frozen weights in place, and merged into the weights after training.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.local_layers import takes_sinks
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.data.batches import block_tokens
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import attach, attention, checkpoint, learned_sinks, model_shape, modes, windows
from spkv_nas.model.distillation import Distillation, copied_teacher, shared_teacher
from spkv_nas.model.gates import predictors
from spkv_nas.training import branch_config, callbacks, run_files
from spkv_nas.training.dense import new_model
from spkv_nas.training.recipe import LoraConfig, Recipe
from spkv_nas.training.variants import Kind, Variant

_SINK_TOKENS = 8192  # training tokens to measure initial sinks on


@dataclass(frozen=True)
class BranchSetup:
    """Model and schedules of a branch."""

    model: PreTrainedModel  # model to train, with the variant applied
    schedule: branch_config.LearningRateSchedule  # learning rate by step
    gates: branch_config.GateSchedule | None = None  # gate phases by step; None without gates
    # file with the dense run's optimizer state to start from; None if there is none
    optimizer_state: Path | None = None
    distillation: Distillation | None = None  # loss of the branch with a teacher; None without one


def branch_recipe(recipe: Recipe, variant: Variant) -> Recipe:
    """Return the recipe of a variant's run, which with gates from scratch begins with the steps of the dense phase.

    SP-KV paper, "Training from scratch": one run with the dense phase's warm-up and the branch's decay and hard gates.
    """
    if not _is_from_scratch(recipe, variant):
        return recipe
    assert recipe.dense is not None
    branch = recipe.branch
    before = recipe.dense.steps
    # Convert fractions of the branch to fractions of the run
    steps = before + branch.steps
    decay_fraction = branch.decay_steps / steps
    warmup_steps = recipe.dense.warmup_steps
    extend = branch.extend
    if extend is not None:
        at = (before + extend.first_step(branch.steps)) / steps
        extend = extend.model_copy(update={"at": at})
    changes = {
        "steps": steps,
        "warmup_steps": warmup_steps,
        "decay_fraction": decay_fraction,
        "extend": extend,
    }
    soft = (before + round(branch.steps * recipe.gates.soft_fraction)) / steps
    gates = recipe.gates.model_copy(update={"soft_fraction": soft})
    return recipe.model_copy(update={"branch": branch.model_copy(update=changes), "gates": gates})


def set_up(
    recipe: Recipe,
    dense: Path | str,
    variant: Variant,
    seed: int,
    sink_logits: Sequence[Tensor] | None = None,
) -> BranchSetup:
    """Set up the branch of a variant; ``seed`` initializes new predictors, ``sink_logits`` learned sinks.

    ``recipe`` is that of the run (``branch_recipe``). Raises ``UserError``: the layout or the gates do not fit the
    model, or it has no RoPE to extend.
    """
    phase = recipe.branch
    gates = recipe.gates
    # Load the model, and schedule its training
    model = start_model(recipe, dense, variant)
    if phase.extend is not None:
        # Check that the model supports longer blocks
        rope = phase.extend.rope.parameters
        callbacks.extended_config(model.config, phase.extend.block_size, rope)
    # Moments of the dense run suit neither adapters, which leave its weights frozen, nor new weights
    state = Path(dense) / run_files.OPTIMIZER_STATE
    continues = recipe.lora is None and not _is_from_scratch(recipe, variant) and state.is_file()
    schedule = branch_config.LearningRateSchedule(
        phase.steps,
        phase.warmup_steps,
        min(phase.decay_steps, phase.steps - phase.warmup_steps),
        phase.final_learning_rate,
    )
    setup = BranchSetup(model, schedule, optimizer_state=state if continues else None)
    # Apply the variant, with the dense model as its teacher if the recipe distills
    apply_variant(model, recipe, variant, seed, sink_logits)
    if phase.distill is not None:
        teacher = distillation(
            recipe, variant, model, lambda: checkpoint.load(dense, dtype=torch.float32)[0]
        )
        setup = replace(setup, distillation=teacher)
    if variant.kind is not Kind.SP_KV:
        return setup
    # Schedule the change from soft to hard gates; hard gates of a frozen model would leave nothing to train
    soft = 1.0 if _is_frozen(recipe, variant) else gates.soft_fraction
    phases = branch_config.GateSchedule(phase.steps, soft, gates.anneal_steps, gates.mode)
    return replace(setup, gates=phases)


def apply_variant(
    model: PreTrainedModel,
    recipe: Recipe,
    variant: Variant,
    seed: int,
    sink_logits: Sequence[Tensor] | None = None,
) -> None:
    """Apply a variant to a dense model: a layout's windows and learned sinks, or gates with new predictors.

    Weights that are not trained are frozen, and LoRA adapters are added if the recipe has them. Learned sinks start
    from ``sink_logits``, [Hq] by layer; None: from 0, for trial steps. Raises ``UserError``: the layout, the gates or
    the adapters do not fit the model.
    """
    if variant.layout is not None:
        windows.apply_layout(model, variant.layout)
    # Freeze weights that are not trained
    if _is_frozen(recipe, variant):
        model.requires_grad_(False)
    elif recipe.lora is not None:
        add_adapters(model, recipe.lora, seed)
    # Add sinks and predictors after the adapters, which freeze all weights and must not extend predictors
    if learns_sinks(recipe, variant):
        windows.add_learned_sinks(model, sink_logits)
    if variant.kind is Kind.SP_KV:
        attach.attach_gates(model, recipe.gates.of_model(), seed=seed)
        if recipe.gates.start_from is not None:
            _copy_predictors(recipe.gates.start_from, model)


def start_model(recipe: Recipe, dense: Path | str, variant: Variant) -> PreTrainedModel:
    """Load the dense checkpoint to train a variant, in the dtype that this needs, or initialize a model from scratch.

    The recipe's precision must be resolved. The checkpoint trains without dropout: SP-KV attention has none, and a
    model is to learn from its own predictions.
    """
    if _is_from_scratch(recipe, variant):
        return new_model(recipe, checkpoint.load_tokenizer(dense))
    bfloat16 = not learns_all(recipe, variant) and recipe.precision == "bfloat16"
    model, _ = checkpoint.load(dense, dtype=frozen_dtype(dense, bfloat16=bfloat16))
    modes.turn_off_dropout(model)
    return model


def frozen_dtype(dense: Path | str, *, bfloat16: bool) -> torch.dtype:
    """Return the dtype for a dense checkpoint's frozen weights.

    That is bfloat16 if they are stored in it and ``bfloat16`` says that the run computes in it, otherwise float32.
    Trained weights are always float32.
    """
    if bfloat16 and checkpoint.saved_dtype(dense) == torch.bfloat16:
        return torch.bfloat16
    return torch.float32


def distillation(
    recipe: Recipe, variant: Variant, student: PreTrainedModel, dense: Callable[[], PreTrainedModel]
) -> Distillation | None:
    """Return the loss of a branch with the dense model as its teacher; None without ``branch.distill``.

    ``student`` has the variant applied, and teaches itself where its weights are frozen; ``dense`` returns another copy
    of the dense model, in float32. The recipe's precision must be resolved.
    """
    options = recipe.branch.distill
    if options is None:
        return None
    # Copy the teacher only if the student changes its weights; else the student without its additions teaches
    if learns_all(recipe, variant):
        teacher = copied_teacher(dense(), student, bfloat16=recipe.precision == "bfloat16")
    elif recipe.lora is not None and not _is_frozen(recipe, variant):
        teacher = shared_teacher(student, adapter_switch(student))
    else:
        teacher = shared_teacher(student)
    return Distillation(teacher, options.weight, options.temperature)


def learns_all(recipe: Recipe, variant: Variant) -> bool:
    """Return True if all weights of a variant are trained, so that a teacher needs a copy of them."""
    return recipe.lora is None and not _is_frozen(recipe, variant)


def learns_sinks(recipe: Recipe, variant: Variant) -> bool:
    """Return True if a variant gets learned sinks: only local heads of layouts do."""
    return recipe.branch.sinks == "learned" and variant.layout is not None


def _is_frozen(recipe: Recipe, variant: Variant) -> bool:
    """Return True if only gates are trained."""
    return variant.kind is Kind.SP_KV and recipe.gates.training == "frozen-model"


def _is_from_scratch(recipe: Recipe, variant: Variant) -> bool:
    """Return True if gates and model are trained from random weights in one run."""
    return variant.kind is Kind.SP_KV and recipe.gates.training == "from-scratch"


def _copy_predictors(source: str, model: PreTrainedModel) -> None:
    """Copy the predictors of the checkpoint ``source``. Raises ``UserError``: they do not fit the model."""
    reference, _ = checkpoint.load(source, dtype=torch.float32)
    trained = predictors(reference)
    try:
        for name, module in predictors(model).items():
            module.load_state_dict(trained[name].state_dict())
    except (KeyError, RuntimeError) as error:
        raise UserError(
            f"the predictors of gates.start_from ({source}) do not fit this model: {error}"
        ) from error


@torch.inference_mode()
def measure_initial_sinks(
    model: PreTrainedModel, layout: Layout, blocks: TokenBlocks
) -> list[torch.Tensor]:
    """Measure the mean score of the first token that the layout hides from its local heads, for each query head.

    About ``_SINK_TOKENS`` tokens of ``blocks``, the training text, are run with full attention, a block at a time. A
    learned sink of this score does in the denominator what the first token does there. The log-sum-exp of all hidden
    keys would also stand for tokens whose values matter, and costs more on every model that was measured
    (``reports/LOG.md``).

    Returns:
        float32 [Hq] on the CPU for each attention layer; 0 for layers whose heads get none (``takes_sinks``).

    Raises ``UserError``: blocks are so short that no key is hidden, or the model has learned sinks of its own.
    """
    # Check that keys are hidden, by one window
    layout.check_one_window("branch.sinks: learned needs one; leave it out")
    if blocks.block_size <= layout.window + layout.sinks:
        raise UserError(
            f"branch.sinks: learned: a window of {layout.window} keys and {layout.sinks} sink "
            f"tokens hide nothing in blocks of {blocks.block_size} tokens\n"
            "use a larger data.block_size, or leave branch.sinks out"
        )
    # Add up the means of blocks by layer
    part = blocks.spread(max(1, _SINK_TOKENS // blocks.block_size))
    num_heads = model_shape.config_shape(model.config).num_heads
    with windows.full_attention(model) as states:
        sums = [torch.zeros(num_heads, dtype=torch.float64) for _ in states]
        for state, total in zip(states, sums, strict=True):
            if takes_sinks(state, layout.window):
                state.observer = _adder(total, layout, state)
        for index in range(part.num_blocks):
            inputs = part.boundaries.inputs(block_tokens(part, index, 1, model.device))
            model.get_decoder()(input_ids=inputs["input_ids"], use_cache=False)
    return [(total / part.num_blocks).float() for total in sums]


def _adder(total: torch.Tensor, layout: Layout, state: attention.LayerState) -> Callable[..., None]:
    """Return an observer that adds the mean score of a block's first hidden token to ``total`` [Hq].

    The mean is over the queries from which the layout hides it, but not the window of the checkpoint.
    """
    hidden = layout.sinks
    queries = slice(hidden + layout.window, hidden + state.checkpoint_window)

    def add(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink_logits: torch.Tensor | None,
    ) -> None:
        if sink_logits is not None:
            raise learned_sinks.native_sinks_error()
        query = q[0, :, queries].cpu().double()  # [Hq, queries, D]
        key = k[0, :, hidden].cpu().double().repeat_interleave(len(query) // k.shape[1], 0)
        scores = (query @ key[..., None])[..., 0] * scale
        if state.softcap is not None:
            scores = state.softcap * torch.tanh(scores / state.softcap)
        total.add_(scores.mean(1))

    return add


def add_adapters(model: PreTrainedModel, options: LoraConfig, seed: int) -> None:
    """Freeze a model's weights and add float32 LoRA adapters to its linear layers, with no initial effect.

    Raises ``UserError`` if the model lacks layers that ``options.targets`` names, or one shares its weight with another
    module, which merging would change too.
    """
    import peft
    from peft.tuners.tuners_utils import cast_adapter_dtype

    # Translate the options for peft
    targets = options.targets if isinstance(options.targets, str) else list(options.targets)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
    )
    # Add adapters whose initial weights depend on the seed alone
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings():
                # Tied embeddings as targets are refused below
                warnings.filterwarnings(
                    "ignore", "Model (with|has) `tie_word_embeddings", UserWarning
                )
                peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise UserError(f"lora.targets: {first_line(error)}") from error
    # Refuse shared weights, and keep the adapters in float32
    _check_shared(model)
    cast_adapter_dtype(model, "default")


def _check_shared(model: PreTrainedModel) -> None:
    """Raise ``UserError`` if a module with an adapter shares its weight with another, such as tied embeddings."""
    owners: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name.removesuffix(".weight"))
    for modules in owners.values():
        adapted = [name for name in modules if name.endswith(".base_layer")]
        if adapted and len(modules) > 1:
            names = [name.removesuffix(".base_layer") for name in modules]
            raise UserError(
                f"lora.targets: {' and '.join(names)} share one tensor (tied embeddings), so that "
                "an adapter of one would be merged into both\n"
                f"leave {adapted[0].removesuffix('.base_layer').split('.')[-1]} out"
            )


@torch.no_grad()
def merge_adapters(model: torch.nn.Module) -> None:
    """Merge the adapters into the weights and remove them; must be called on all ranks if the model is sharded."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {
        name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    }
    for name, module in adapted.items():
        module.merge()
        model.set_submodule(name, module.get_base_layer())
    if adapted:
        del model.peft_config


def adapter_switch(model: torch.nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose contexts disable the adapters of a model, which then computes as without them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    @contextmanager
    def without_adapters() -> Iterator[None]:
        # peft's public call also changes which parameters are trained, which DDP must not see
        for module in adapted:
            module._disable_adapters = True
        try:
            yield
        finally:
            for module in adapted:
                module._disable_adapters = False

    return without_adapters
