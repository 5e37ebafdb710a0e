"""What a command would train, before it does: runs, tokens, time and memory. Nothing is written.

What is finished is found where training would find it, so a plan is right about what is reused, as long as the text is
what it was: whether it has changed, training finds out when it reads it. One step of every kind
of variant that is left to train is tried (``step_cost``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from spkv_kernels.timing import device_name
from transformers import PreTrainedTokenizerBase, TrainingArguments

from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.base.device import choose_device
from spkv_nas.base.memory import available_bytes
from spkv_nas.base.progress import Announce, silent
from spkv_nas.base.units import format_bytes
from spkv_nas.data.splits import train_tokenizer
from spkv_nas.model.checkpoint import load_tokenizer, read_size
from spkv_nas.model.model_shape import config_size
from spkv_nas.model.source import resolve
from spkv_nas.training.arguments import training_arguments
from spkv_nas.training.branch_setup import dense_model, dress
from spkv_nas.training.branches import branch_folder, is_finished
from spkv_nas.training.dense import dense_run, is_dense_trained, new_config, new_model
from spkv_nas.training.recipe import BranchConfig, DenseConfig, Recipe
from spkv_nas.training.run_files import newest_step
from spkv_nas.training.step_cost import MOST_SECONDS, StepCost, estimate, how_trained, measure
from spkv_nas.training.text_size import TextSize, count_text
from spkv_nas.training.variants import Kind, Variant

ROOM = 0.8  # share of the free memory that training is planned to take
FINISHED = "finished"
_WARNING = "warning: "  # what those of a recipe begin with


@dataclass(frozen=True)
class PlannedRun:
    """One run, or one pass over text.

    Attributes:
        name: of the variant, or of what passes.
        steps: in all; 0 of a pass that trains nothing.
        tokens: that are left to train on, or to pass.
        seconds: that they take; of a run its evaluation too.
        state: "" for a new one, ``FINISHED``, or from where it goes on.
    """

    name: str
    steps: int
    tokens: int
    seconds: float
    state: str = ""


@dataclass(frozen=True)
class Plan:
    """What a command would do.

    Attributes:
        name: of the recipe or the results.
        runs: in their order.
        remarks: sentences about text, time and memory.
        memory: bytes at the peak of a training step; 0 where nothing is left to train.
        available: bytes that are free on the device.
    """

    name: str
    runs: tuple[PlannedRun, ...]
    remarks: tuple[str, ...] = ()
    memory: int = 0
    available: int = 0

    @property
    def seconds(self) -> float:
        """Of everything that is left."""
        return sum(run.seconds for run in self.runs)

    @property
    def fits(self) -> bool:
        """Whether there is memory for it."""
        return self.memory <= self.available


def together(name: str, runs: Sequence[PlannedRun]) -> PlannedRun:
    """Runs of equal steps in one line."""
    finished = sum(run.state == FINISHED for run in runs)
    state = FINISHED if finished == len(runs) else f"{finished} of {len(runs)} finished" if finished else ""
    return PlannedRun(
        f"{name}, {len(runs)}", runs[0].steps, sum(run.tokens for run in runs), sum(run.seconds for run in runs), state
    )


def combined(name: str, plans: Sequence[Plan]) -> Plan:
    """Several plans as one, with the remarks of the one that takes most memory, and the warnings of all."""
    first = max(plans, key=lambda plan: plan.memory)
    warned = [remark for plan in plans for remark in plan.remarks if remark.startswith(_WARNING)]
    runs = tuple(run for plan in plans for run in plan.runs)
    return Plan(name, runs, tuple(dict.fromkeys([*first.remarks, *warned])), first.memory, first.available)


class Planner:
    """Plans the runs of one recipe.

    Args:
        base: folder that the recipe's relative paths start from.
        runs: folder of its checkpoints and caches, which may not be there yet.
        announce: told what is tried.
        text: how much text there is, where that is known.

    Attributes:
        available: bytes that were free on the device before anything was tried.
    """

    def __init__(
        self,
        recipe: Recipe,
        base: Path,
        runs: Path,
        *,
        device: str | None = None,
        announce: Announce = silent,
        text: TextSize | None = None,
    ) -> None:
        self.device, self._announce = choose_device(device), announce
        self.recipe = recipe.settled(self.device)
        self.available = available_bytes(self.device)
        self._base, self._runs, self._text = base, runs, text
        self._costs: dict[Kind, StepCost] = {}

    def other(self, recipe: Recipe) -> Planner:
        """Plans another recipe of the same folders, with what is known already of its text and its steps."""
        text = self._text if _text_of(recipe) == _text_of(self.recipe) else None
        planner = Planner(recipe, self._base, self._runs, device=self.device, announce=self._announce, text=text)
        if _step_of(planner.recipe) == _step_of(self.recipe):
            planner._costs = self._costs
        planner.available = self.available
        return planner

    @cached_property
    def dense_path(self) -> Path:
        """The dense checkpoint, there or not."""
        folder = dense_run(self.recipe, self._runs)
        return resolve(str(self.recipe.model.path)) if folder is None else folder / "final"

    @cached_property
    def _has_dense(self) -> bool:
        return self.recipe.model.path is not None or is_dense_trained(self.dense_path.parent)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The recipe's; a BPE that is still to be trained is trained in memory."""
        recipe = self.recipe
        if recipe.tokenizer is None or recipe.tokenizer.path is not None:
            return load_tokenizer(str(recipe.tokenizer.path if recipe.tokenizer else recipe.model.path))
        if self._has_dense:
            return load_tokenizer(self.dense_path)
        assert recipe.tokenizer.vocab_size is not None
        self._announce("training a tokenizer, to count tokens with")
        return train_tokenizer(recipe.data, recipe.tokenizer.vocab_size, self._base)

    @property
    def text(self) -> TextSize:
        """How much text the recipe has."""
        if self._text is None:
            self._announce("counting the tokens of the text")
            self._text = count_text(self.recipe.data.sources, self._base, self.tokenizer)
        return self._text

    @cached_property
    def size(self) -> ModelSize:
        """How large the model is, its gates aside."""
        path = self.recipe.model.path
        return config_size(new_config(self.recipe, self.tokenizer)) if path is None else read_size(path)

    def dense(self) -> list[PlannedRun]:
        """The run of the dense model; none where the recipe is given one."""
        phase = self.recipe.dense
        if phase is None:
            return []
        done = phase.steps if self._has_dense else newest_step(self.dense_path.parent)
        return [self._run("dense", phase, done, Variant.full_attention(), evaluated=False)]

    def branch(self, name: str, variant: Variant, seed: int | None = None) -> PlannedRun:
        """The run of a variant."""
        recipe, seed = self.recipe, self.recipe.seed if seed is None else seed
        phase: BranchConfig = recipe.branch
        if variant.kind is Kind.SP_KV and recipe.gates.training == "from-scratch" and recipe.dense is not None:
            phase = phase.model_copy(update={"steps": recipe.dense.steps + phase.steps})
        done = 0
        if self._has_dense:
            folder = branch_folder(recipe, self.dense_path, self._runs, variant, seed)
            done = phase.steps if is_finished(folder / "final") else newest_step(folder)
        return self._run(name, phase, done, variant)

    def new_branch(self, name: str, variant: Variant) -> PlannedRun:
        """A run of a variant that is not trained yet, whatever its layout will be."""
        return self._run(name, self.recipe.branch, 0, variant)

    def heldout_pass(self, name: str, variant: Variant, times: int = 1, tokens: int | None = None) -> PlannedRun:
        """Passes over the held-out text, or over ``tokens`` of it, without training."""
        seen = times * (self.text.heldout(self.recipe.data) if tokens is None else tokens)
        return PlannedRun(name, 0, seen, self._forward_seconds(variant, seen))

    def cost(self, variant: Variant) -> StepCost:
        """What a step of the variant takes; hybrids cost about the same, whatever their layouts."""
        if variant.kind not in self._costs:
            self._costs[variant.kind] = self._cost(variant)
        return self._costs[variant.kind]

    def plan(self, runs: Iterable[PlannedRun]) -> Plan:
        """The plan of runs that this planner made."""
        runs = tuple(runs)
        if not self._costs:  # nothing is left to do
            return Plan(self.recipe.name, runs)
        together = max(phase.per_device_train_batch_size for phase in self._arguments)
        trains = any(run.steps and run.state != FINISHED for run in runs)
        needed = max(cost.memory(together) for cost in self._costs.values()) if trains else 0
        warned = [f"{_WARNING}{line}" for line in self.recipe.warnings()] if Kind.SP_KV in self._costs else []
        return Plan(self.recipe.name, runs, (*self._remarks(needed), *warned), needed, self.available)

    def _run(
        self, name: str, phase: DenseConfig | BranchConfig, done: int, variant: Variant, *, evaluated: bool = True
    ) -> PlannedRun:
        left = phase.steps - done
        if left <= 0:
            return PlannedRun(name, phase.steps, 0, 0.0, FINISHED)
        tokens = left * phase.batch_size * self.recipe.data.block_size
        seconds = left * self.cost(variant).seconds(phase.batch_size)
        if evaluated:
            seconds += self._forward_seconds(variant, self.text.heldout(self.recipe.data))
        return PlannedRun(name, phase.steps, tokens, seconds, f"goes on from step {done}" if done else "")

    def _forward_seconds(self, variant: Variant, tokens: int) -> float:
        return self.cost(variant).forward_seconds * tokens / self.recipe.data.block_size

    @cached_property
    def _arguments(self) -> list[TrainingArguments]:
        """Of the phases, as training has them."""
        phases = [phase for phase in (self.recipe.dense, self.recipe.branch) if phase is not None]
        return [training_arguments(self.recipe, phase, self._runs, device=self.device) for phase in phases]

    def _cost(self, variant: Variant) -> StepCost:
        recipe, device = self.recipe, self.device
        block_size, gated = recipe.data.block_size, variant.kind is Kind.SP_KV
        how = how_trained(recipe, recipe.branch, self.size, bfloat16=self._arguments[-1].bf16, gated=gated)
        guess = estimate(self.size, block_size, how, device=device)
        room = (ROOM * self.available - guess.fixed_bytes) / guess.block_bytes
        tried = min(self._arguments[-1].per_device_train_batch_size, int(room), int(MOST_SECONDS / guess.pass_seconds))
        if tried < 1:
            return guess
        self._announce(f"trying a step: {variant.name if variant.layout is None else 'a layout'}")
        model = dense_model(recipe, self.dense_path, variant) if self._has_dense else new_model(recipe, self.tokenizer)
        dress(model, recipe, variant, recipe.seed)
        try:
            return measure(model, (tried, block_size), how, device=device)
        except (torch.OutOfMemoryError, MemoryError):  # the plan says what is needed
            return guess

    def _remarks(self, needed: int) -> Iterator[str]:
        """Sentences about the text, the time and the memory of what is left to train."""
        recipe, text = self.recipe, self.text
        training, heldout = text.training(recipe.data), text.heldout(recipe.data)
        some = "about" if text.is_whole else "at least"
        yield f"text: {some} {training:,} tokens to train on, {heldout:,} held out; {text.documents:,} documents"
        batch = recipe.branch.batch_size * recipe.data.block_size
        if text.is_whole and training < batch:
            yield f"that is less than one batch of {batch:,} tokens: give more text, or a smaller batch or block"
        elif text.is_whole and (epochs := recipe.branch.steps * batch / training) > 1:
            yield f"every run of {recipe.branch.steps} steps reads that text {epochs:.1f} times"
        cost = next(iter(self._costs.values()))
        how = "timed" if cost.is_measured else "estimated by FLOPs, at half the speed of a matrix product,"
        yield f"time: {how} on {device_name(self.device)}, {cost.seconds(recipe.branch.batch_size):.2g} s a step"
        if (extend := recipe.branch.extend) is not None:
            yield f"attention takes longer than that in blocks of {extend.block_size:,} tokens (branch.extend)"
        free = format_bytes(self.available)
        if not needed:  # nothing is left to train
            return
        if needed > self.available:
            yield (
                f"memory: training takes about {format_bytes(needed)}, and {free} are free; "
                "a smaller micro_batch_size or data.block_size takes less, but never under "
                f"{format_bytes(min(cost.fixed_bytes for cost in self._costs.values()))}"
            )
        else:
            yield f"memory: about {format_bytes(needed)} of the {free} that are free"


def _text_of(recipe: Recipe) -> str:
    """Changes with the text and with what makes tokens of it."""
    return recipe.content_hash("model", "tokenizer", "data")


def _step_of(recipe: Recipe) -> list[object]:
    """Changes with what a training step does."""
    gates = recipe.gates.model_dump(include={"predictor", "hidden_size", "kernel_size", "window", "heads", "training"})
    sections = ("model", "tokenizer", "data", "precision", "micro_batch_size", "gradient_checkpointing")
    hashed = recipe.content_hash(*sections, "lora", "optimizer")
    return [hashed, recipe.branch.batch_size, gates, recipe.gates.layers, recipe.gates.mode]
