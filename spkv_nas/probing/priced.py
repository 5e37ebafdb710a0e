"""Priced gates on a frozen model: train SP-KV gates for a density probe at a fraction of a reference's training cost.

The model's weights are frozen. Only new utility predictors are trained, on the next-token loss plus the sparsity
penalty lambda * mean(u). Lambda, the price of a key (``model.density_tracker``), is adjusted until gates keep a target
share of the keys. The heads selected this way are as good as those of a reference model whose weights are trained too
(reports/LOG.md), for a few hundred thousand tokens.

The optimizer is AdamW with betas 0.9 and 0.95, no weight decay for vectors, and a cosine decay to 1 % of the learning
rate, as in the paper ("Scaling analysis details"). Memory is that of inference, plus the predictors with their moments
and the activations of one pass. Activation checkpointing is used if the activations of a single block would not fit.
A step that still runs out of GPU memory is repeated in smaller micro-batches.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts import defaults, diagnosis
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.base import arrays, distributed, manifest, memory, replace
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import Bar, no_progress
from spkv_nas.cost.ladder import predictor_learning_rate
from spkv_nas.data.batches import shuffled_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.tokenizer import Boundaries
from spkv_nas.evaluation.micro_batch import check_blocks
from spkv_nas.model import attach, density_tracker, gates, model_shape, modes, weights
from spkv_nas.model.density_tracker import KeyBenefitEstimator, Price
from spkv_nas.model.loss import mean_nll
from spkv_nas.model.placement import input_device
from spkv_nas.probing import frozen

_WEIGHT_DECAY = 0.1
_BETAS = (0.9, 0.95)
_FINAL = 0.01
_SAVE_EVERY = 20  # steps
_FILE = "gates.pt"  # checkpoint to resume from


@dataclass(frozen=True)
class GateTraining:
    """Result of training gates on a frozen model."""

    steps: int  # number of training steps
    tokens: int  # number of training tokens
    density: float  # mean density over heads in the last step
    price: float  # sparsity penalty lambda in the last step
    resumed_at: int  # step from which this call resumed; ``steps`` if training had already finished

    def as_mapping(self) -> dict[str, object]:
        """Return the entries for ``probe.yaml``."""
        return {
            "training": diagnosis.FROZEN,
            "training_steps": self.steps,
            "training_tokens": self.tokens,
            "price": float(f"{self.price:.4g}"),
        }


def learn_gates(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    config: GateConfig,
    *,
    steps: int = defaults.PRICED_STEPS,
    step_tokens: int = defaults.LEARNING_TOKENS,
    learning_rate: float | None = None,
    seed: int = 0,
    state: Path | None = None,
    progress: Bar = no_progress,
) -> GateTraining:
    """Attach gates to ``model`` and train them on ``blocks`` toward a target density; must be called on all ranks.

    Args:
        model: a decoder without gates; its own weights do not change. The gates are left in soft mode.
        blocks: training text; every block is used once before any is repeated.
        config: gate configuration with a target density or a fixed price.
        steps: number of training steps.
        step_tokens: tokens per step, rounded down to whole blocks.
        learning_rate: initial learning rate of the predictors; defaults to a rate for the model's size.
        seed: seed of the predictors and of the order of the blocks.
        state: folder for checkpoints, from which an interrupted run resumes.
        progress: called with (steps done, total, density).

    Raises ``UserError``: the model has gates or cannot have them, there is no price or text, or a loss is not finite.
    """
    _check(model, blocks, config)
    # Attach gates and restore the last checkpoint
    size = frozen.blocks_per_step(blocks, step_tokens)
    attach.attach_gates(model, config, seed=seed)
    num_parameters = model_shape.model_size(model).without_embeddings
    rate = learning_rate or predictor_learning_rate(num_parameters)
    learning = _Learning(model, config, blocks.boundaries, rate, steps)
    predictors = gates.predictor_parameters(model)
    freezing = frozen.frozen_within_memory(model, blocks.block_size, size, predictors, config)
    with modes.evaluation_mode(model), freezing as micro_batch:
        resumed_at = learning.restore(state)
        batches = shuffled_batches(blocks.num_blocks, size, steps, seed + 1)
        for step, block_indices in enumerate(batches):
            if step < resumed_at:
                continue
            # Train on this rank's share of the batch
            tokens = frozen.rank_tokens(blocks, np.sort(block_indices), input_device(model))
            sizes = blocks.boundaries.num_measured(blocks.marked(block_indices))
            learning.step(step, tokens, sizes, micro_batch)
            progress(step + 1, steps, f"density {learning.density:.2f}")
            if state is not None and ((step + 1) % _SAVE_EVERY == 0 or step + 1 == steps):
                distributed.on_main(partial(learning.save, state, step + 1))
    modes.set_price(model, 0.0)
    return GateTraining(
        steps=steps,
        tokens=steps * size * blocks.block_size,
        density=learning.density,
        price=learning.last_price,
        resumed_at=resumed_at,
    )


def _check(model: PreTrainedModel, blocks: TokenBlocks, config: GateConfig) -> None:
    """Raise ``UserError`` unless gates of a model can be trained on ``blocks``, towards a density or at a price."""
    if config.target_density is None and not config.price:
        raise UserError(
            "gates on a frozen model need a target density, or a price above 0 (the sparsity "
            "penalty)"
        )
    check_blocks(model, blocks)
    weights.check_placed(model)


class _Learning:
    """Training loop state of the predictors, advanced one ``step`` at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: GateConfig,
        boundaries: Boundaries,
        learning_rate: float,
        steps: int,
    ) -> None:
        """Create the optimizer, the learning-rate schedule and the price controller."""
        self._model = model
        self._config = config
        self._boundaries = boundaries
        predictors = gates.predictor_parameters(model)
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter in predictors
        }
        # Apply weight decay to matrices and kernels, not to biases
        matrices = [parameter for parameter in self._parameters.values() if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._parameters.values() if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": _WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=_BETAS, fused=True)
        # Let the learning rate fall along a cosine, to ``_FINAL`` times its first value
        self._rates = []
        for step in range(steps):
            cosine = math.cos(math.pi * step / steps)
            self._rates.append(learning_rate * (_FINAL + (1.0 - _FINAL) * 0.5 * (1.0 + cosine)))
        self._price = None if config.target_density is None else Price(config.target_density)
        self._tracker = density_tracker.DensityTracker(model)
        # In the last step: mean density over heads, and price of a key
        self.density = math.nan
        self.last_price = math.nan

    def step(
        self,
        number: int,
        tokens: Tensor,
        sizes: tuple[int, int],
        micro_batch: memory.AdaptiveBatchSize,
    ) -> None:
        """Apply update ``number`` from 0 on all ranks, with this rank's ``tokens`` int64 [B, T].

        ``sizes`` are the tokens to predict and those of text (``Boundaries.num_measured``) of all ranks.
        """
        price = self._price
        self.last_price = self._config.price if price is None else float(price.value)

        # Gradients, summed over ranks
        gradients = partial(self._add_gradients, sizes=sizes)
        total, benefits = frozen.run_micro_batches(gradients, tokens, micro_batch)
        frozen.check_finite(
            "the training loss of the gates", float(distributed.sum_over_processes(total)), number
        )
        distributed.sum_gradients(self._parameters.values())
        # Adjust the price toward the target density
        measured = self._tracker.stop()
        assert measured is not None
        self.density = float(np.nanmean(measured))
        if price is not None:
            if benefits is not None:
                price.begin(distributed.sum_over_processes(benefits))
            price.move(torch.tensor(self.density, dtype=torch.float64), self._rates[number])
        # Update the predictors
        for group in self._optimizer.param_groups:
            group["lr"] = self._rates[number]
        self._optimizer.step()

    def _add_gradients(
        self, parts: Iterator[Tensor], sizes: tuple[int, int]
    ) -> tuple[Tensor, arrays.Float | None]:
        """Compute a step's gradients from zero by ``parts`` int64 [b, T]; ``sizes`` are those of the step.

        Return this rank's share of the step's mean loss, and benefits of keys until the first price is set.
        """
        # Estimate the benefit of keys once, to start the price from
        measures = self._price is not None and not self._price.first
        benefits = KeyBenefitEstimator(self._model) if measures else None
        self._optimizer.zero_grad()
        self._tracker.start()
        total = torch.zeros((), device=input_device(self._model))
        try:
            for tokens in parts:
                # Weight loss and price by the shares of this micro-batch
                num_targets, num_tokens = self._boundaries.num_measured(tokens.cpu().numpy())
                modes.set_price(self._model, self.last_price * (num_tokens / sizes[1]))
                mean_loss = mean_nll(self._model, **self._boundaries.inputs(tokens))
                loss = mean_loss * (num_targets / sizes[0])
                total += loss.detach()
                torch.autograd.backward(loss)
        finally:
            estimates = None if benefits is None else benefits.stop()
        return total, estimates

    def save(self, folder: Path, step: int) -> None:
        """Write a checkpoint after ``step`` steps, atomically over an earlier one, with a manifest against damage.

        Raises ``UserError``: ``folder`` cannot be written.
        """
        state = {
            "step": step,
            "density": self.density,
            "last_price": self.last_price,
            "price": None if self._price is None else self._price.state(),
            "parameters": {
                name: parameter.detach() for name, parameter in self._parameters.items()
            },
            "optimizer": self._optimizer.state_dict(),
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replace.new_folder(folder) as new_path:
            try:
                torch.save(state, new_path / _FILE)
            except (OSError, RuntimeError) as error:
                raise UserError(
                    f"cannot write {folder}: {first_line(error)}\ncheck disk space and permissions"
                ) from error
            manifest.write_manifest(new_path)

    @torch.no_grad()
    def restore(self, folder: Path | None) -> int:
        """Restore the checkpoint in ``folder``, if there is a complete one, and return the number of finished steps.

        Raises ``UserError``: it is damaged, or that of other gates.
        """
        if folder is None or not manifest.is_complete(folder, [_FILE]):
            return 0
        manifest.check_manifest(folder, what="gates")
        saved = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
        if set(saved["parameters"]) != set(self._parameters):
            raise UserError(
                "the saved gates belong to another model: give another folder for the checkpoint "
                "of the gates"
            )
        for name, parameter in self._parameters.items():
            parameter.copy_(saved["parameters"][name])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.density = saved["density"]
        self.last_price = saved["last_price"]
        if self._price is not None:
            self._price.restore(saved["price"])
        return int(saved["step"])
