"""The runs of a recipe: the dense checkpoint, and the branches that start from it.

SP-KV paper, "Overall protocol": one dense model up to the decay, then branches that differ in attention alone and
share data order, number of steps, learning rates and optimizer state.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.distributed import connect, num_processes, on_main, share
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_atomic
from spkv_nas.base.version import environment
from spkv_nas.data.blocks import TokenBlocks, cache_split, read_split, train_tokenizer
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.evaluation.split import split_evaluation
from spkv_nas.evaluation.sweep import evaluate
from spkv_nas.model.checkpoint import is_complete, load, load_tokenizer, save, write_manifest
from spkv_nas.model.gates import predictors
from spkv_nas.model.hook import apply_layout, attach_gates
from spkv_nas.training.phases import GateSchedule, LearningRateSchedule
from spkv_nas.training.recipe import BranchConfig, Recipe
from spkv_nas.training.sharding import FSDP_CONFIG, sharded_checkpoint, whole_weights
from spkv_nas.training.trainer import (
    BlockDataset,
    HeldoutCallback,
    SPKVTrainer,
    TokenProgressCallback,
    newest_complete_checkpoint,
    save_optimizer_state,
    write_density_log,
    write_heldout_log,
    write_train_log,
)

OPTIMIZER_STATE = "optimizer-state.safetensors"


@dataclass(frozen=True)
class Corpus:
    """A recipe's text as token blocks, and the tokenizer that made them."""

    tokenizer: PreTrainedTokenizerBase
    train: TokenBlocks
    heldout: TokenBlocks


@dataclass(frozen=True)
class Branch:
    """A finished branch: its checkpoint, and its held-out NLL by document."""

    checkpoint: Path
    nll: DocumentNLL
    density: float | None  # mean over heads and held-out tokens at the recipe's tau; None without gates
    steps: int


def start(recipe: Recipe, device: str | None = None) -> None:
    """Join the processes of torchrun. Raises ``UserError`` if they cannot share the recipe's batches evenly."""
    for phase in (recipe.dense, recipe.branch):
        if phase is not None:
            share(phase.batch_size)
    connect(device)


def load_corpus(recipe: Recipe, base: Path, folder: Path) -> Corpus:
    """The recipe's text as blocks, tokenised once under ``folder``; a BPE is trained there if the recipe asks for it.

    Args:
        base: folder that the recipe's relative paths start from.
    """
    source = recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model.path
    if source is not None:
        tokenizer = load_tokenizer(source)
    else:
        saved = folder / f"tokenizer-{recipe.content_hash('tokenizer', 'data')}"
        on_main(lambda: _new_tokenizer(recipe, base, saved))
        tokenizer = load_tokenizer(saved)
    blocks = on_main(lambda: cache_split(recipe.data, tokenizer, folder / "blocks", base))
    return Corpus(tokenizer, *read_split(blocks, recipe.data))


def _new_tokenizer(recipe: Recipe, base: Path, folder: Path) -> None:
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.vocab_size is not None
    if not is_complete(folder):
        train_tokenizer(recipe.data, recipe.tokenizer.vocab_size, base).save_pretrained(folder)
        write_manifest(folder)


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The recipe's model with fresh weights (``model.config``), its vocabulary taken from the tokenizer."""
    options: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": recipe.data.block_size}
    options |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    options |= dict(recipe.model.config or {})
    try:
        config = AutoConfig.for_model(**options)
        set_seed(recipe.seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"recipe {recipe.name}: model.config cannot be built: {error}") from error
    return model


def train_dense(recipe: Recipe, corpus: Corpus, folder: Path, *, device: str | None = None) -> Path:
    """Train the recipe's dense model up to the decay; the finished checkpoint's folder. Resumes, or returns at once."""
    final = folder / "final"
    if on_main(lambda: is_complete(final)):
        return final
    assert recipe.dense is not None
    phase = recipe.dense
    trainer = SPKVTrainer(
        model=new_model(recipe, corpus.tokenizer),
        args=_arguments(recipe, phase, folder, device),
        train_dataset=BlockDataset(corpus.train),
        schedule=LearningRateSchedule(phase.steps, phase.warmup_steps, 0),
        callbacks=[TokenProgressCallback("dense")],
    )
    _train(trainer, folder)
    weights = whole_weights(trainer.model)
    on_main(lambda: _save_run(trainer, weights, corpus, final))
    save_optimizer_state(trainer.optimizer, trainer.model, final / OPTIMIZER_STATE)
    on_main(lambda: write_manifest(final))
    return final


def train_branch(
    recipe: Recipe,
    corpus: Corpus,
    dense: Path | str,
    folder: Path,
    variant: str | Layout,
    *,
    seed: int | None = None,
    device: str | None = None,
) -> Branch:
    """Train one branch of the dense checkpoint and evaluate it. Resumes, or returns the finished run.

    Args:
        variant: ``full-attention``, ``sp-kv``, or a layout (a hybrid).
        seed: of the data order (and of new predictors); the recipe's by default.
    """
    final = folder / "final"
    if on_main(lambda: is_complete(final)):
        return read_branch(final)
    seed = recipe.seed if seed is None else seed
    plan = _plan(recipe, corpus, dense, variant, seed)
    model = plan.model
    trainer = SPKVTrainer(
        model=model,
        args=_arguments(recipe, plan.phase, folder, device, seed=seed + 1),
        train_dataset=BlockDataset(corpus.train),
        schedule=plan.schedule,
        gates=plan.gates,
        gate_options=recipe.gates,
        optimizer_state=plan.optimizer_state,
        callbacks=[TokenProgressCallback(variant if isinstance(variant, str) else variant.strategy)],
    )
    if plan.gates is not None and recipe.evaluation.every is not None:
        some = corpus.heldout.take(max(1, recipe.evaluation.max_tokens // corpus.heldout.block_size))
        trainer.add_callback(HeldoutCallback(trainer, some, recipe.evaluation.every))
    _train(trainer, folder)
    tau = None if plan.gates is None else recipe.gates.tau
    size = recipe.evaluation.batch_size
    measured = split_evaluation(
        model, corpus.heldout, size, lambda blocks: evaluate(model, blocks, tau, batch_size=size)
    )
    weights = whole_weights(trainer.model)

    def finish() -> None:
        _save_run(trainer, weights, corpus, final)
        measured.nll.save(final / "heldout-nll.npz")
        write_heldout_log(trainer.state, final / "heldout-log.csv")
        write_density_log(trainer.state, final / "density-log.csv")
        record = {
            "variant": variant if isinstance(variant, str) else variant.strategy,
            "heldout_nll": measured.nll.mean,
            "heldout_tokens": int(measured.nll.num_tokens.sum()),
            "heldout_density": measured.density,
            "steps": plan.phase.steps,
            "seed": seed,
            "processes": num_processes(),
            "recipe": recipe.model_dump(mode="json"),
            "environment": environment(),
        }
        write_atomic(final / "run.json", json.dumps(record, indent=1) + "\n")
        write_manifest(final)
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)

    on_main(finish)
    return read_branch(final)


def _save_run(trainer: SPKVTrainer, weights: dict[str, Tensor] | None, corpus: Corpus, final: Path) -> None:
    """The checkpoint of a finished run and its log, in place of what an interrupted attempt left."""
    shutil.rmtree(final, ignore_errors=True)
    save(trainer.model, corpus.tokenizer, final, weights)
    write_train_log(trainer.state, final / "train-log.csv")


def read_branch(final: Path) -> Branch:
    """A finished branch from its folder."""
    record = json.loads((final / "run.json").read_text())
    return Branch(final, DocumentNLL.read(final / "heldout-nll.npz"), record["heldout_density"], record["steps"])


@dataclass(frozen=True)
class _Plan:
    """What a branch trains, and how."""

    model: PreTrainedModel
    phase: BranchConfig
    schedule: LearningRateSchedule
    gates: GateSchedule | None = None
    optimizer_state: Path | None = None


def _plan(recipe: Recipe, corpus: Corpus, dense: Path | str, variant: str | Layout, seed: int) -> _Plan:
    """The branch's model, dressed, and its schedules."""
    phase, gates = recipe.branch, recipe.gates
    if variant == SP_KV and gates.training == "from-scratch":
        return _from_scratch(recipe, corpus, seed)
    model, _ = load(dense, dtype=torch.float32)
    state = Path(dense) / OPTIMIZER_STATE
    plan = _Plan(
        model=model,
        phase=phase,
        schedule=LearningRateSchedule(
            phase.steps, phase.warmup_steps, phase.steps - phase.warmup_steps, phase.final_learning_rate
        ),
        optimizer_state=state if state.is_file() else None,
    )
    if isinstance(variant, Layout):
        apply_layout(model, variant)
    elif variant == SP_KV:
        frozen = gates.training == "frozen-model"
        if frozen:
            model.requires_grad_(False)
        _attach(model, recipe, seed)
        soft = 1.0 if frozen else gates.soft_fraction  # with hard gates nothing would be left to learn
        return replace(plan, gates=GateSchedule(phase.steps, soft, gates.anneal_steps, gates.mode))
    elif variant != FULL_ATTENTION:
        raise UserError(f"unknown branch '{variant}'; expected {FULL_ATTENTION}, {SP_KV} or a layout")
    return plan


def _from_scratch(recipe: Recipe, corpus: Corpus, seed: int) -> _Plan:
    """Gates from the first step (paper, "Training from scratch"): the dense phase and the branch are one run."""
    assert recipe.dense is not None
    gates, decay = recipe.gates, recipe.branch.steps
    steps = recipe.dense.steps + decay
    model = new_model(recipe, corpus.tokenizer)
    _attach(model, recipe, seed)
    return _Plan(
        model=model,
        phase=recipe.branch.model_copy(update={"steps": steps}),
        schedule=LearningRateSchedule(steps, recipe.dense.warmup_steps, decay, recipe.branch.final_learning_rate),
        gates=GateSchedule(steps, gates.soft_fraction, gates.anneal_steps, gates.mode, decay),
    )


def _attach(model: PreTrainedModel, recipe: Recipe, seed: int) -> None:
    text = model.config.get_text_config()
    grid = (text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    attach_gates(model, recipe.gates.of_model(grid), seed=seed)
    if recipe.gates.start_from is not None:
        _copy_predictors(recipe.gates.start_from, model)


def _copy_predictors(source: str, model: PreTrainedModel) -> None:
    reference, _ = load(source, dtype=torch.float32)
    trained = predictors(reference)
    try:
        for name, module in predictors(model).items():
            module.load_state_dict(trained[name].state_dict())
    except (KeyError, RuntimeError) as error:
        raise UserError(f"the predictors of gates.start_from ({source}) do not fit this model: {error}") from error


def _arguments(recipe: Recipe, phase: Any, folder: Path, device: str | None, *, seed: int | None = None) -> Any:
    sharded = recipe.sharding == "fsdp" and num_processes() > 1
    own = share(phase.batch_size)
    micro_batch_size = max(n for n in range(1, min(own, recipe.micro_batch_size or own) + 1) if own % n == 0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=phase.steps,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=own // micro_batch_size,
        learning_rate=phase.learning_rate,
        weight_decay=phase.weight_decay,
        max_grad_norm=phase.max_grad_norm,
        save_strategy="steps",
        save_steps=recipe.checkpoint_every,
        save_total_limit=2,
        logging_steps=10,
        logging_nan_inf_filter=False,
        dataloader_drop_last=True,
        seed=recipe.seed if seed is None else seed,
        use_cpu=device == "cpu" or not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available() and device != "cpu",
        bf16=recipe.precision == "bfloat16",
        report_to=["tensorboard"] if recipe.tensorboard else [],
        disable_tqdm=True,  # of the library's own bar; ours is a callback
        ddp_find_unused_parameters=False,  # a frozen predictor stays linked to the loss
        fsdp=sharded or None,
        fsdp_config=dict(FSDP_CONFIG) if sharded else None,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # a process has one GPU; on several, DataParallel would widen the batch
    return arguments


def _train(trainer: SPKVTrainer, folder: Path) -> None:
    batch = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps * num_processes()
    if len(trainer.train_dataset) < batch:
        raise UserError(
            f"the training text gives {len(trainer.train_dataset)} blocks, fewer than one batch of {batch}\n"
            "give more text, a smaller block_size or a smaller batch_size"
        )
    newest = on_main(lambda: newest_complete_checkpoint(folder))
    if newest is not None and sharded_checkpoint(newest) != bool(trainer.args.fsdp):
        raise UserError(
            f"{newest} was written {'without' if trainer.args.fsdp else 'with'} sharding: fsdp, which this run cannot "
            "read\ngo on as it was begun, or delete it to start over"
        )
    trainer.train(resume_from_checkpoint=str(newest) if newest else None)
