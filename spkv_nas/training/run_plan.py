"""Planning of training commands: estimate runs, tokens, time and memory before training, without writing anything.

Finished runs are looked up where training would look for them, so a plan is right about reuse unless the text has
changed, which only training detects. One training step is timed for each kind of variant with runs left to train
(``step_cost``); memory is that of the formulas (``cost.stage_costs``).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from spkv_kernels.timing import device_name
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.base import memory, progress, units
from spkv_nas.base.device import choose_device
from spkv_nas.cost import formulas, stage_costs
from spkv_nas.data.splits import train_tokenizer
from spkv_nas.model.checkpoint import load_tokenizer, read_size
from spkv_nas.model.model_shape import config_size
from spkv_nas.model.source import resolve
from spkv_nas.training import arguments, branch_setup, branches, dense, first_recipe, run_files
from spkv_nas.training.branch_config import BranchConfig
from spkv_nas.training.recipe import DenseConfig, Recipe
from spkv_nas.training.step_cost import MAX_SECONDS, StepCost, estimate, how_trained, measure
from spkv_nas.training.variants import Kind, Variant

ROOM = 0.8  # share of the free memory that trial steps may use
FINISHED = "finished"
_WARNING = "warning: "  # prefix of a recipe's warnings among the remarks


@dataclass(frozen=True)
class PlannedRun:
    """Planned training run, or planned forward passes over text."""

    name: str  # name of the variant or of the measurement
    steps: int  # total number of training steps; 0 for forward passes
    tokens: int  # number of tokens left to process
    seconds: float  # estimated time for them, including a run's evaluation
    state: str = ""  # "" for a new run, ``FINISHED``, or the step that it resumes from


@dataclass(frozen=True)
class Plan:
    """Plan of a command."""

    name: str  # name of the recipe or of the results
    runs: tuple[PlannedRun, ...]  # runs in order
    remarks: tuple[str, ...] = ()  # sentences about text, time and memory
    memory: int = 0  # peak bytes of a training step; 0 if nothing is left to train
    available: int = 0  # free bytes on the device

    @property
    def seconds(self) -> float:
        """Return the estimated time for all work left."""
        return sum(run.seconds for run in self.runs)

    @property
    def fits(self) -> bool:
        """Return whether the memory is sufficient."""
        return self.memory <= self.available


def summarize_runs(name: str, runs: Sequence[PlannedRun]) -> PlannedRun:
    """Summarize runs with the same number of steps as one."""
    num_finished = sum(run.state == FINISHED for run in runs)
    state = ""
    if num_finished == len(runs):
        state = FINISHED
    elif num_finished:
        state = f"{num_finished} of {len(runs)} finished"
    return PlannedRun(
        name=f"{name}, {len(runs)}",
        steps=runs[0].steps,
        tokens=sum(run.tokens for run in runs),
        seconds=sum(run.seconds for run in runs),
        state=state,
    )


def merge_plans(name: str, plans: Sequence[Plan]) -> Plan:
    """Merge plans, with the remarks of the one that needs the most memory and the warnings of all."""
    first = max(plans, key=lambda plan: plan.memory)
    warned = [remark for plan in plans for remark in plan.remarks if remark.startswith(_WARNING)]
    return Plan(
        name=name,
        runs=tuple(run for plan in plans for run in plan.runs),
        remarks=tuple(dict.fromkeys([*first.remarks, *warned])),
        memory=first.memory,
        available=first.available,
    )


class Planner:
    """Planner of the runs of one recipe; what it needs is measured once, when it is needed."""

    def __init__(
        self,
        recipe: Recipe,
        base: Path,
        runs: Path,
        *,
        device: str | None = None,
        announce: progress.Announce = progress.silent,
        text: first_recipe.TextSize | None = None,
    ) -> None:
        """Resolve the recipe, whose relative paths start from ``base``, for the device.

        ``runs`` is the folder of its checkpoints, which may not exist yet, and ``text`` the size of its text if known.
        ``announce`` receives a line for each measurement.
        """
        self.device = choose_device(device)
        self._announce = announce
        self.recipe = recipe.resolve_precision(self.device)
        self.available = memory.available_bytes(self.device)  # before any measurement
        self._base = base
        self._runs = runs
        self._text = text
        self._costs: dict[Kind, StepCost] = {}

    def with_recipe(self, recipe: Recipe) -> "Planner":
        """Create a planner for another recipe in the same folders, which reuses measurements that apply to it."""
        sections = ("model", "tokenizer", "data")
        has_same_text = recipe.content_hash(*sections) == self.recipe.content_hash(*sections)
        text = self._text if has_same_text else None
        planner = Planner(
            recipe, self._base, self._runs, device=self.device, announce=self._announce, text=text
        )
        if _step_of(planner.recipe) == _step_of(self.recipe):
            planner._costs = self._costs
        planner.available = self.available
        return planner

    @cached_property
    def dense_path(self) -> Path:
        """Return the folder of the dense checkpoint, which may not exist yet."""
        folder = dense.dense_run(self.recipe, self._runs)
        return resolve(str(self.recipe.model.path)) if folder is None else folder / "final"

    @cached_property
    def _has_dense(self) -> bool:
        return self.recipe.model.path is not None or dense.is_dense_trained(self.dense_path.parent)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the recipe's tokenizer; a BPE that does not exist yet is trained in memory."""
        recipe = self.recipe
        if recipe.tokenizer is None:
            return load_tokenizer(str(recipe.model.path))
        if recipe.tokenizer.path is not None:
            return load_tokenizer(str(recipe.tokenizer.path))
        if self._has_dense:
            return load_tokenizer(self.dense_path)
        assert recipe.tokenizer.vocab_size is not None
        self._announce("training a tokenizer, to count tokens with")
        return train_tokenizer(
            recipe.data, recipe.tokenizer.vocab_size, self._base, recipe.tokenizer.bos
        )

    @property
    def text(self) -> first_recipe.TextSize:
        """Return the size of the recipe's text."""
        if self._text is None:
            self._announce("counting the tokens of the text")
            self._text = first_recipe.count_text(
                self.recipe.data.sources, self._base, self.tokenizer
            )
        return self._text

    @cached_property
    def size(self) -> ModelSize:
        """Return the size of the model without gates."""
        path = self.recipe.model.path
        if path is not None:
            return read_size(path)
        return config_size(dense.new_config(self.recipe, self.tokenizer))

    def dense(self) -> list[PlannedRun]:
        """Plan the run of the dense model; the list is empty if the recipe names an existing model."""
        phase = self.recipe.dense
        if phase is None:
            return []
        done = phase.steps if self._has_dense else run_files.newest_step(self.dense_path.parent)
        return [self._run("dense", phase, done, Variant.full_attention(), evaluated=False)]

    def branch(self, name: str, variant: Variant, seed: int | None = None) -> PlannedRun:
        """Plan the branch of a variant, reusing its checkpoints if there are any."""
        recipe = self.recipe
        seed = recipe.seed if seed is None else seed
        phase = branch_setup.branch_recipe(recipe, variant).branch
        done = 0
        if self._has_dense:
            folder = branches.branch_folder(recipe, self.dense_path, self._runs, variant, seed)
            is_finished = branches.is_finished(folder / "final")
            done = phase.steps if is_finished else run_files.newest_step(folder)
        return self._run(name, phase, done, variant)

    def new_branch(self, name: str, variant: Variant) -> PlannedRun:
        """Plan a new branch of a variant, whose layout may not be known yet."""
        return self._run(name, self.recipe.branch, 0, variant)

    def heldout_pass(
        self,
        name: str,
        variant: Variant,
        times: float = 1,
        tokens: int | None = None,
        effort: float = 1,
    ) -> PlannedRun:
        """Plan ``times`` passes over held-out text, or ``tokens`` of it, each as costly as ``effort`` forward ones."""
        if tokens is None:
            tokens = self.text.heldout(self.recipe.data)
        num_tokens = round(times * tokens)
        seconds = effort * self._forward_seconds(variant, num_tokens)
        return PlannedRun(name, 0, num_tokens, seconds)

    def cost(self, variant: Variant) -> StepCost:
        """Return the cost of a training step, measured once per kind of variant: all hybrids cost about the same."""
        if variant.kind not in self._costs:
            self._costs[variant.kind] = self._cost(variant)
        return self._costs[variant.kind]

    def plan(self, runs: Iterable[PlannedRun]) -> Plan:
        """Assemble the plan from runs of this planner."""
        runs = tuple(runs)
        if not self._costs:  # nothing is left to do
            return Plan(self.recipe.name, runs)
        micro_batch_size = max(phase.per_device_train_batch_size for phase in self._arguments)
        trains = any(run.steps and run.state != FINISHED for run in runs)
        needed = max(self.memory(kind, micro_batch_size) for kind in self._costs) if trains else 0
        warned = (
            [f"{_WARNING}{line}" for line in self.recipe.warnings()]
            if Kind.SP_KV in self._costs
            else []
        )
        return Plan(
            self.recipe.name, runs, (*self._remarks(needed), *warned), needed, self.available
        )

    def _run(
        self,
        name: str,
        phase: DenseConfig | BranchConfig,
        done: int,
        variant: Variant,
        *,
        evaluated: bool = True,
    ) -> PlannedRun:
        """Plan the remaining steps of a run after ``done`` steps."""
        remaining = phase.steps - done
        if remaining <= 0:
            return PlannedRun(name, phase.steps, 0, 0.0, FINISHED)
        tokens = remaining * phase.batch_size * self.recipe.data.block_size
        seconds = remaining * self.cost(variant).seconds(phase.batch_size)
        if evaluated:
            seconds += self._forward_seconds(variant, self.text.heldout(self.recipe.data))
        return PlannedRun(
            name, phase.steps, tokens, seconds, f"resumes from step {done}" if done else ""
        )

    def _forward_seconds(self, variant: Variant, tokens: int) -> float:
        return self.cost(variant).forward_seconds * tokens / self.recipe.data.block_size

    @cached_property
    def _arguments(self) -> list[TrainingArguments]:
        """Return the training arguments of the dense phase, if any, and the branch phase."""
        phases = [phase for phase in (self.recipe.dense, self.recipe.branch) if phase is not None]
        return [
            arguments.training_arguments(self.recipe, phase, self._runs, device=self.device)
            for phase in phases
        ]

    @cached_property
    def _stages(self) -> stage_costs.Stages:
        """Return the formulas of memory and FLOPs for the recipe's model on the device."""
        chunk = memory.chunk_bytes(self.device)
        site = stage_costs.Site(self.device, math.inf, is_cpu=self.device == "cpu", chunk=chunk)
        return stage_costs.Stages(
            self.size, self.recipe.gates.of_model(), site, self.recipe.data.block_size, 1
        )

    def _training(self, kind: Kind) -> stage_costs.Training:
        """Return how the branch of a kind of variant is trained."""
        bfloat16 = self._arguments[-1].bf16
        gated = kind is Kind.SP_KV
        return how_trained(
            self.recipe, self.recipe.branch, self.size, bfloat16=bfloat16, gated=gated
        )

    def memory(self, kind: Kind, blocks: int) -> int:
        """Return the peak bytes of a training step with micro-batches of ``blocks``; 0: without activations."""
        return round(
            self._stages.training_bytes(
                self._training(kind), 1, blocks, gated=kind is Kind.SP_KV
            ).total
        )

    def fitting_blocks(self, kind: Kind) -> int:
        """Return the largest micro-batch size whose step fits in ``ROOM``, up to that of the recipe, or 0."""
        largest = self._arguments[-1].per_device_train_batch_size
        return formulas.largest_fit(
            largest, ROOM * self.available, lambda blocks: self.memory(kind, blocks)
        )

    def _cost(self, variant: Variant) -> StepCost:
        """Time a step, or estimate its time if a trial would take too much memory or time."""
        # Size of the trial batch that fits
        recipe = self.recipe
        device = self.device
        training = self._training(variant.kind)
        guess = estimate(self._stages, training, gated=variant.kind is Kind.SP_KV)
        num_blocks = min(self.fitting_blocks(variant.kind), int(MAX_SECONDS / guess.pass_seconds))
        if num_blocks < 1:
            return guess
        # Measure
        self._announce(f"trying a step: {variant.name if variant.layout is None else 'a layout'}")
        model = self._model(variant)
        branch_setup.apply_variant(model, recipe, variant, recipe.seed)
        loss = branch_setup.distillation(recipe, variant, model, lambda: self._model(variant))
        try:
            return measure(
                model,
                (num_blocks, recipe.data.block_size),
                training,
                device=device,
                distillation=loss,
            )
        except (torch.OutOfMemoryError, MemoryError):  # the plan reports the memory needed
            return guess

    def _model(self, variant: Variant) -> PreTrainedModel:
        """Return the dense model for a trial step of a variant, with new weights if it does not exist yet."""
        if self._has_dense:
            return branch_setup.start_model(self.recipe, self.dense_path, variant)
        return dense.new_model(self.recipe, self.tokenizer)

    def _remarks(self, needed: int) -> Iterator[str]:
        """Yield sentences about the text, the time and the memory of the training left."""
        # Text
        recipe = self.recipe
        text = self.text
        training = text.training(recipe.data)
        heldout = text.heldout(recipe.data)
        about = "about" if text.is_whole else "at least"
        yield (
            f"text: {about} {training:,} tokens to train on, {heldout:,} held out; "
            f"{text.documents:,} documents"
        )
        batch = recipe.branch.batch_size * recipe.data.block_size
        if text.is_whole and training < batch:
            yield (
                f"that is less than one batch of {batch:,} tokens: give more text, "
                "or a smaller batch or block"
            )
        elif text.is_whole and (epochs := recipe.branch.steps * batch / training) > 1:
            yield f"every run of {recipe.branch.steps} steps reads that text {epochs:.1f} times"
        # Time
        cost = next(iter(self._costs.values()))
        method = (
            "timed"
            if cost.is_measured
            else "estimated by FLOPs, at half the speed of a matrix product,"
        )
        yield (
            f"time: {method} on {device_name(self.device)}, "
            f"{cost.seconds(recipe.branch.batch_size):.2g} s a step"
        )
        # Memory, if anything is left to train
        takes = units.format_bytes(needed)
        free = units.format_bytes(self.available)
        if needed > self.available:
            least = units.format_bytes(min(self.memory(kind, 0) for kind in self._costs))
            yield (
                f"memory: training takes about {takes}, and {free} are free; "
                f"a smaller micro_batch_size or data.block_size takes less, but never under {least}"
            )
        elif needed:
            experts = ", for one expert per token and layer" if self.size.is_mixture else ""
            yield f"memory: about {takes} of the {free} that are free{experts}"


def _step_of(recipe: Recipe) -> list[object]:
    """Return a key that changes with the computation of a training step."""
    gates = recipe.gates.model_dump(
        include={"predictor", "hidden_size", "kernel_size", "window", "heads", "training"}
    )
    sections = (
        "model",
        "tokenizer",
        "data",
        "precision",
        "micro_batch_size",
        "gradient_checkpointing",
    )
    hashed = recipe.content_hash(*sections, "lora", "optimizer")
    branch = recipe.branch
    return [hashed, branch.batch_size, branch.distill, branch.sinks, gates, recipe.gates.mode]
