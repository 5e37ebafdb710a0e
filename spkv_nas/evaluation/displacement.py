"""Compare the next-token predictions of a model with the dense model's, in the passes that compute the NLL.

The dense model's logits of a text fill a disk, so its last hidden states are kept of the tokens to compare, and its
logits are computed from them again, part by part, when another model's are in memory. That is one more product with the
LM head for each token that is compared, which is a sixth of a small model's pass; so one token of eight is compared,
and at most 128 of a block. Logits go through the model's own forward pass: soft caps, scales and biases apply.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.displacement import QUANTILE, STATES, VALUES, Displacement
from spkv_nas.base import arrays, statistics
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import loss

# One token of so many is compared: with all, the product with the LM head takes a sixth longer
_STEP = 8
_MOST = (
    128  # tokens of a block that are compared at most, which bounds the hidden states that are kept
)
_NUM_CHECKED = 4  # tokens of a text whose logits, from hidden states alone, are compared with those of the pass
_AGREES = (
    1e-3  # nats by which these may differ: bfloat16 rounds products of other shapes differently
)
# Nats of a prediction without any probability for a token that the dense model finds possible
_INFINITE = 1e4
_NUM_VALUES = 3  # of ``VALUES``
# ``VALUES`` of the dense model itself, and where nothing can be compared; axes in files have a length of at least 1
NOTHING = np.full((_NUM_VALUES, 1, 1), -1.0)


def compared_columns(block_size: int) -> arrays.Int:
    """Return which of a block's ``block_size`` - 1 predictions are compared, int64 [K], evenly spaced."""
    number = block_size - 1
    step = min(max(_STEP, math.ceil(number / _MOST)), number)
    return np.arange(step - 1, number, step)


@contextmanager
def first_output(model: PreTrainedModel) -> Iterator[list[Any]]:
    """Collect the output of the model's next decoder pass inside the ``with`` block; later passes are not."""
    outputs: list[Any] = []

    def see(_decoder: Any, _arguments: Any, output: Any) -> None:
        outputs.append(output)
        handle.remove()

    handle = model.get_decoder().register_forward_hook(see)
    try:
        yield outputs
    finally:
        handle.remove()


class StateRecorder:
    """Keep the dense model's last hidden states of the tokens to compare, while its NLL is computed."""

    def __init__(self, blocks: TokenBlocks) -> None:
        """Begin without any."""
        self._columns = torch.from_numpy(compared_columns(blocks.block_size))
        self._num_blocks = blocks.num_blocks
        self._parts: dict[int, NDArray[np.integer]] = {}
        self._is_possible = True

    def token_nll(self, model: PreTrainedModel, start: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute ``loss.token_nll`` of the blocks from ``start`` on, and keep their hidden states."""
        device = inputs["input_ids"].device
        logits: list[Tensor] = []

        def read(first: int, some: Tensor) -> None:
            if first == 0:
                logits.append(some[:_NUM_CHECKED].clone())

        reader = None if self._parts else loss.LogitReader(self._columns.to(device), read)
        with first_output(model) as outputs:
            losses = loss.read_nll(model, inputs, reader)
        hidden = getattr(outputs[0], "last_hidden_state", None)
        if hidden is None:
            self._is_possible = False
        else:
            states = hidden[:, self._columns.to(hidden.device)]
            if logits:
                self._is_possible = _agrees(model, type(outputs[0]), states, logits[0])
            bits = torch.int16 if states.element_size() == 2 else torch.int32
            self._parts[start] = states.view(bits).cpu().numpy()
        return losses

    def result(self) -> dict[str, NDArray[np.integer]]:
        """Return ``STATES`` of all blocks, in order; one channel if logits do not depend on them alone."""
        if not self._is_possible:
            return {STATES.name: np.zeros((self._num_blocks, len(self._columns), 1), np.int32)}
        return {STATES.name: np.concatenate([self._parts[start] for start in sorted(self._parts)])}


def _agrees(model: PreTrainedModel, output: type, states: Tensor, logits: Tensor) -> bool:
    """Return whether logits [n, V] of a pass are those that hidden states [B, K, C] alone give the first n tokens."""
    some = states.flatten(0, 1)[: len(logits)]
    recomputed = loss.logits_of(model.get_decoder(), output, some[None], model).squeeze(0)
    return bool((divergences(log_softmax(recomputed), log_softmax(logits)) <= _AGREES).all())


class Comparison:
    """Compare a model's predictions with those of the dense model's hidden states, while its NLL is computed."""

    def __init__(self, blocks: TokenBlocks, states: NDArray[np.integer]) -> None:
        """Begin a comparison with ``STATES`` of these blocks."""
        self._columns = torch.from_numpy(compared_columns(blocks.block_size))
        self._states = states
        self._is_possible = states.shape[-1] > 1
        self._values = no_values(blocks)

    def token_nll(self, model: PreTrainedModel, start: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute ``loss.token_nll`` of the blocks from ``start`` on, and compare the predictions."""
        if not self._is_possible:
            return loss.token_nll(model, **inputs)
        ids = inputs["input_ids"]
        columns = self._columns.to(ids.device)
        targets = ids[:, columns + 1].flatten()
        rows = slice(start, start + len(ids))
        bits = torch.from_numpy(self._states[rows]).flatten(0, 1)
        parts: list[Tensor] = []

        def read(first: int, logits: Tensor) -> None:
            part = slice(first, first + len(logits))
            hidden = outputs[0].last_hidden_state
            states = bits[part].view(hidden.dtype).to(hidden.device)
            dense = loss.logits_of(model.get_decoder(), type(outputs[0]), states[None], model)
            parts.append(compared(dense.squeeze(0), logits, targets[part]).cpu())

        with first_output(model) as outputs:
            losses = loss.read_nll(model, inputs, loss.LogitReader(columns, read))
        values = torch.cat(parts, 1).view(_NUM_VALUES, len(ids), len(columns))
        self._values[:, rows] = values.numpy()
        return losses

    def result(self) -> dict[str, arrays.Float]:
        """Return ``VALUES`` of all blocks; ``NOTHING`` where logits depend on more than hidden states."""
        return {VALUES.name: self._values if self._is_possible else NOTHING}


def no_values(blocks: TokenBlocks) -> arrays.Float:
    """Return ``VALUES`` of all blocks, to be filled in."""
    num_columns = len(compared_columns(blocks.block_size))
    return np.zeros((_NUM_VALUES, blocks.num_blocks, num_columns))


def compared(dense: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Compare predictions, from logits [n, V] of both models and the right tokens [n]: float [3, n] (``VALUES``)."""
    # A candidate's ties count as the same; one maximum is several times as fast as a second argmax
    top = dense.max(-1, keepdim=True).indices
    is_same = logits.gather(1, top).squeeze(1) == logits.amax(-1)
    log_p = log_softmax(dense)
    log_q = log_softmax(logits)
    ids = targets[:, None]
    delta = (log_q.gather(1, ids).exp() - log_p.gather(1, ids).exp()).squeeze(1)
    return torch.stack([divergences(log_p, log_q), is_same.to(delta.dtype), delta])


def log_softmax(logits: Tensor) -> Tensor:
    """Compute log-probabilities from logits [n, V], in float32, or in more if the logits have more."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def divergences(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(p || q) in nats of each prediction, at least 0, from log-probabilities [n, V], which are overwritten.

    It is at most ``_INFINITE``, which is that of a q without any probability for a token that p has some for.
    """
    # Tokens without probability have infinite logarithms, whose product with 0 is no number
    terms = log_q.neg_().add_(log_p).mul_(log_p.exp_()).nan_to_num_(nan=0.0, posinf=_INFINITE)
    return terms.sum(-1).clamp_(0.0, _INFINITE)


def summary(blocks: TokenBlocks, parts: Sequence[arrays.Float]) -> Displacement | None:
    """Return the statistics of ``VALUES`` of consecutive parts of a text; None if nothing was compared."""
    if any(part[0, 0, 0] < 0.0 for part in parts):  # ``NOTHING``
        return None
    values = np.concatenate(parts, axis=1)
    # Leave out first tokens of documents, which nothing predicts
    columns = compared_columns(blocks.block_size) + 1
    is_predicted = ~blocks.begins_text()[:, columns]
    if not is_predicted.any():
        return None
    divergence, is_same, delta = values[:, is_predicted]
    owner = blocks.document[:, columns][is_predicted]
    count = np.bincount(owner).astype(np.int64)
    by_document = np.stack(
        [np.bincount(owner, each).astype(np.float64) for each in (divergence, is_same)]
    )
    means, errors = statistics.jackknife_ratio(by_document, count)
    return Displacement(
        num_compared=len(divergence),
        kl_mean=float(means[0]),
        kl_standard_error=float(errors[0]),
        kl_median=float(np.median(divergence)),
        kl_quantile=float(np.quantile(divergence, QUANTILE)),
        same_top=100.0 * float(means[1]),
        same_top_standard_error=100.0 * float(errors[1]),
        delta_p_mean=100.0 * float(delta.mean()),
        delta_p_rms=100.0 * float(np.sqrt((delta**2).mean())),
    )
