"""Priced gates on a frozen model: a density for any decoder, at a fraction of what training a reference takes.

No weight of the model moves. New predictors alone learn, from next-token loss at a price of keys (``model.price``) that
keeps a target share of them. The choice of heads that follows is as good as that of a reference whose weights learn too
(reports/LOG.md), and takes a few hundred thousand tokens.

Adam without decay of vectors, betas 0.9 and 0.95, and a cosine to a hundredth of the rate, as in the paper ("Scaling
analysis details"). Memory is that of inference, the predictors with their moments, and the activations of a pass; where
those of a single block would not fit, each layer's are computed again (activation checkpointing). A step for which a
GPU has no memory all the same is begun again in smaller passes.

The processes of torchrun part the blocks of a step; more processes than it has blocks are of no use.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.defaults import LEARNING_TOKENS, PRICED_STEPS
from spkv_nas.artifacts.diagnosis import FROZEN
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.base.distributed import on_main, own_share, sum_gradients, sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import AdaptiveBatchSize
from spkv_nas.base.progress import Bar, no_progress
from spkv_nas.cost.ladder import predictor_learning_rate
from spkv_nas.data.batches import shuffled_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.activation_checkpointing import recomputed
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.density_tracker import DensityTracker
from spkv_nas.model.device_map import check_placed
from spkv_nas.model.gates import predictor_parameters
from spkv_nas.model.loss import mean_nll
from spkv_nas.model.model_shape import model_size
from spkv_nas.model.modes import evaluation_mode, set_price
from spkv_nas.model.price import KeyBenefitEstimator, Price
from spkv_nas.probing.frozen import frozen, passes
from spkv_nas.probing.gate_state import GateState

STEP_TOKENS = LEARNING_TOKENS
_WEIGHT_DECAY, _BETAS, _FINAL = 0.1, (0.9, 0.95), 0.01
_SAVE_EVERY = 20  # steps


@dataclass(frozen=True)
class Learned:
    """What learning took, and where it ended.

    Attributes:
        steps, tokens: of the training.
        density: mean over heads in the last step.
        price: of a key in the last step.
        resumed_at: step from which this call went on; ``steps`` if all was done before.
    """

    steps: int
    tokens: int
    density: float
    price: float
    resumed_at: int

    def as_mapping(self) -> dict[str, Any]:
        """As ``probe.yaml`` has it."""
        return {
            "training": FROZEN, "training_steps": self.steps, "training_tokens": self.tokens,
            "price": float(f"{self.price:.4g}"),
        }  # fmt: skip


def learn_gates(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    config: GateConfig,
    *,
    steps: int = PRICED_STEPS,
    step_tokens: int = STEP_TOKENS,
    learning_rate: float | None = None,
    seed: int = 0,
    state: Path | None = None,
    progress: Bar = no_progress,
) -> Learned:
    """Put gates on ``model`` and have them learn on ``blocks`` at the price of ``config.target_density``. Collective.

    Args:
        model: a decoder without gates; its own weights are left as they are. The gates are left soft.
        blocks: training text; each block comes once before any comes again, in an order drawn by ``seed``.
        config: of the gates, with a target density (or a fixed price).
        steps, step_tokens: how long, and the tokens of a step; fewer if there are not so many.
        learning_rate: of the predictors, at first; by default what suits the model's size.
        state: folder in which the gates are kept meanwhile, and from which this goes on.
        progress: called with (steps done, in all, density).

    Raises:
        UserError: the model has gates, or cannot have them; no price; no text; a loss that is not finite.
    """
    if config.target_density is None and not config.price:
        raise UserError("gates on a frozen model need a price: give a target density")
    if blocks.num_blocks == 0:
        raise UserError("there is no text for gates to learn on")
    check_placed(model)
    size = min(blocks.num_blocks, max(1, step_tokens // blocks.block_size))
    attach_gates(model, config, seed=seed)
    rate = learning_rate or predictor_learning_rate(model_size(model).without_embeddings)
    learning = _Learning(model, config, rate, steps)
    with frozen(model, predictor_parameters(model)), evaluation_mode(model):
        fitting, recomputes = passes(model, blocks.block_size, size, config)
        together = AdaptiveBatchSize(fitting)
        first = learning.restore(state)
        batches = shuffled_batches(blocks.num_blocks, size, steps, seed + 1)
        with recomputed(model) if recomputes else nullcontext():
            for step, chosen in enumerate(batches):
                if step < first:
                    continue
                mine = own_share(size)
                own = np.sort(chosen)[mine.start : mine.stop]
                tokens = torch.from_numpy(blocks.tokens[own].astype(np.int64)).to(model.device)
                learning.step(step, tokens, size, together)
                progress(step + 1, steps, f"density {learning.density:.2f}")
                if state is not None and ((step + 1) % _SAVE_EVERY == 0 or step + 1 == steps):
                    on_main(partial(learning.save, state, step + 1))
    set_price(model, 0.0)
    return Learned(steps, steps * size * blocks.block_size, learning.density, learning.last_price, first)


class _Learning:
    """Predictors that learn: one ``step`` after the other.

    Attributes:
        density: mean over heads in the last step.
        last_price: in the last step.
    """

    def __init__(self, model: PreTrainedModel, config: GateConfig, learning_rate: float, steps: int) -> None:
        self._model, self._config = model, config
        named = dict(model.named_parameters())
        own = predictor_parameters(model)
        self._parameters = {name: parameter for name, parameter in named.items() if parameter in own}
        groups = [
            {"params": [p for p in self._parameters.values() if p.ndim >= 2], "weight_decay": _WEIGHT_DECAY},
            {"params": [p for p in self._parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=_BETAS, fused=True)
        self._rates = [learning_rate * _cosine(step, steps) for step in range(steps)]
        self._price = None if config.target_density is None else Price(config.target_density)
        self._watch = DensityTracker(model)
        self.density = self.last_price = math.nan

    def step(self, number: int, tokens: Tensor, num_blocks: int, together: AdaptiveBatchSize) -> None:
        """Update ``number``, from 0, from int64 [B, T] tokens: ``num_blocks`` of all processes. Collective."""
        moved = self._price
        self.last_price = self._config.price if moved is None else moved.value

        def gradients(size: int) -> tuple[Tensor, NDArray[np.float64] | None]:
            return self._add_gradients(torch.split(tokens, size), num_blocks)

        total, benefits = together.run(gradients, max(1, len(tokens)))
        total = sum_over_processes(total)
        if not torch.isfinite(total):
            raise UserError(
                f"the loss is {float(total)}\nthe model's weights are damaged or diverged, or its activations overflow "
                "in its dtype: --dtype float32"
            )
        sum_gradients(self._parameters.values())
        measured = self._watch.stop()
        assert measured is not None
        self.density = float(np.nanmean(measured))
        if moved is not None:
            if benefits is not None:
                moved.begin(sum_over_processes(benefits))
            moved.move(self.density, self._rates[number])
        for group in self._optimizer.param_groups:
            group["lr"] = self._rates[number]
        self._optimizer.step()

    def _add_gradients(self, parts: tuple[Tensor, ...], num_blocks: int) -> tuple[Tensor, NDArray[np.float64] | None]:
        """The loss of a step's tokens, and the benefits of keys until the first price is known; from the beginning."""
        measures = self._price is not None and not self._price.is_measured
        benefits = KeyBenefitEstimator(self._model) if measures else None
        self._optimizer.zero_grad()
        self._watch.start()
        total = torch.zeros((), device=self._model.device)
        try:
            for tokens in filter(len, parts):  # this process may have none
                share = len(tokens) / num_blocks  # the last part may be smaller
                set_price(self._model, self.last_price * share)
                loss = mean_nll(self._model, tokens) * share
                total += loss.detach()
                torch.autograd.backward(loss)
        finally:
            found = None if benefits is None else benefits.stop()
        return total, found

    def save(self, folder: Path, step: int) -> None:
        """Write the gates after ``step`` steps, and all that going on takes."""
        numbers = {"density": self.density, "last_price": self.last_price}
        if self._price is not None:
            numbers |= {f"price.{key}": value for key, value in self._price.state().items()}
        GateState.of(self._parameters, self._optimizer, step, numbers).write(folder)

    def restore(self, folder: Path | None) -> int:
        """Go on from what ``save`` wrote; the steps that are done."""
        saved = None if folder is None else GateState.read(folder)
        if saved is None:
            return 0
        saved.restore(self._parameters, self._optimizer)
        self.density, self.last_price = saved.numbers["density"], saved.numbers["last_price"]
        if self._price is not None:
            self._price.restore({key: saved.numbers[f"price.{key}"] for key in self._price.state()})
        return saved.step


def _cosine(step: int, steps: int) -> float:
    return _FINAL + (1.0 - _FINAL) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
