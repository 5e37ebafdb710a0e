"""Compare the next-token predictions of a model with the dense model's, in the passes that compute the NLL.

The dense model's logits of a text fill a disk, so its last hidden states are kept of the tokens to compare, and its
logits are computed from them again, part by part, when another model's are in memory. That is one more product with the
LM head for each token that is compared, which is a sixth of a small model's pass; so one token of eight is compared,
and at most 128 of a block. They are drawn at random, so that their mean is an unbiased estimate of the block's. Logits
go through the model's own forward pass: soft caps, scales and biases apply.
"""

import zlib
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
DIVERGENCE = 0
SAME_TOP = 1
# ``VALUES`` where nothing can be compared; axes in files have a length of at least 1
NOTHING = np.full((_NUM_VALUES, 1, 1), -1.0)


def compared_columns(blocks: TokenBlocks) -> arrays.Int:
    """Return which predictions of each block are compared, int64 [B, K] from 0 on: a stratified random sample.

    One is drawn from each of K stretches of equal length, by the tokens of the block, so that all models are compared
    on the same ones. Each prediction is drawn as often as any other, which makes the mean over them unbiased.
    """
    number = blocks.block_size - 1
    num_drawn = num_compared(blocks.block_size)
    draws = [
        np.random.default_rng(zlib.crc32(tokens.tobytes())).random(num_drawn)
        for tokens in blocks.tokens
    ]
    places = (np.arange(num_drawn) + np.stack(draws)) * (number / num_drawn)
    return np.minimum(places.astype(np.int64), number - 1)


def num_compared(block_size: int) -> int:
    """Return how many predictions of a block are compared."""
    return max(1, min((block_size - 1) // _STEP, _MOST))


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
        self._blocks = blocks
        self._columns = torch.from_numpy(compared_columns(blocks))
        self._parts: dict[int, NDArray[np.integer]] = {}
        self._is_possible = True

    def token_nll(self, model: PreTrainedModel, start: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute ``loss.token_nll`` of the blocks from ``start`` on, and keep their hidden states."""
        ids = inputs["input_ids"]
        columns = self._columns[start : start + len(ids)].to(ids.device)
        logits: list[Tensor] = []

        def read(first: int, some: Tensor) -> None:
            if first == 0:
                logits.append(some[:_NUM_CHECKED].clone())

        reader = None if self._parts else loss.LogitReader(columns, read)
        with first_output(model) as outputs:
            losses = loss.read_nll(model, inputs, reader)
        hidden = getattr(outputs[0], "last_hidden_state", None)
        if hidden is None:
            self._is_possible = False
        else:
            states = loss.at_columns(hidden, columns.to(hidden.device))
            if logits:
                self._is_possible = _agrees(model, type(outputs[0]), states, logits[0])
            bits = torch.int16 if states.element_size() == 2 else torch.int32
            self._parts[start] = states.view(bits).cpu().numpy()
        return losses

    def result(self) -> dict[str, NDArray[Any]]:
        """Return ``STATES`` and the dense model's own ``VALUES`` of all blocks, in order.

        States have one channel, and values are ``NOTHING``, if logits do not depend on the states alone.
        """
        if not self._is_possible:
            no_states = np.zeros((*self._columns.shape, 1), np.int32)
            return {STATES.name: no_states, VALUES.name: NOTHING}
        states = np.concatenate([self._parts[start] for start in sorted(self._parts)])
        values = no_values(self._blocks)
        values[SAME_TOP] = 1.0
        return {STATES.name: states, VALUES.name: values}


def _agrees(model: PreTrainedModel, output: type, states: Tensor, logits: Tensor) -> bool:
    """Return whether logits [n, V] of a pass are those that hidden states [B, K, C] alone give the first n tokens."""
    some = states.flatten(0, 1)[: len(logits)]
    recomputed = loss.logits_of(model.get_decoder(), output, some[None], model).squeeze(0)
    return bool((divergences(log_softmax(recomputed), log_softmax(logits)) <= _AGREES).all())


class Comparison:
    """Compare a model's predictions with those of the dense model's hidden states, while its NLL is computed."""

    def __init__(
        self, blocks: TokenBlocks, states: NDArray[np.integer], dense: PreTrainedModel
    ) -> None:
        """Begin a comparison with ``STATES`` of these blocks under the ``dense`` model, which has its own LM head."""
        self._dense = dense
        self._columns = torch.from_numpy(compared_columns(blocks))
        self._states = states
        self._is_possible = states.shape[-1] > 1
        self._values = no_values(blocks)

    def token_nll(self, model: PreTrainedModel, start: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute ``loss.token_nll`` of the blocks from ``start`` on, and compare the predictions."""
        if not self._is_possible:
            return loss.token_nll(model, **inputs)
        dense = self._dense
        ids = inputs["input_ids"]
        rows = slice(start, start + len(ids))
        columns = self._columns[rows].to(ids.device)
        targets = ids.gather(1, columns + 1).flatten()
        bits = torch.from_numpy(self._states[rows]).flatten(0, 1)
        parts: list[Tensor] = []

        def read(first: int, logits: Tensor) -> None:
            part = slice(first, first + len(logits))
            hidden = outputs[0].last_hidden_state
            states = bits[part].view(hidden.dtype).to(hidden.device)
            expected = loss.logits_of(dense.get_decoder(), type(outputs[0]), states[None], dense)
            expected = expected.squeeze(0).to(logits.device)
            parts.append(compared(expected, logits, targets[part]).cpu())

        with first_output(model) as outputs:
            losses = loss.read_nll(model, inputs, loss.LogitReader(columns, read))
        values = torch.cat(parts, 1).view(_NUM_VALUES, *columns.shape)
        self._values[:, rows] = values.numpy()
        return losses

    def result(self) -> dict[str, arrays.Float]:
        """Return ``VALUES`` of all blocks; ``NOTHING`` where logits depend on more than hidden states."""
        return {VALUES.name: self._values if self._is_possible else NOTHING}


def no_values(blocks: TokenBlocks) -> arrays.Float:
    """Return ``VALUES`` of all blocks, to be filled in."""
    return np.zeros((_NUM_VALUES, blocks.num_blocks, num_compared(blocks.block_size)))


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


def is_measured(parts: Sequence[arrays.Float]) -> bool:
    """Return whether ``VALUES`` of parts of a text are those of predictions, none of them ``NOTHING``."""
    return all(part[DIVERGENCE, 0, 0] >= 0.0 for part in parts)


def compared_documents(blocks: TokenBlocks) -> arrays.Int:
    """Return the document of each token that is compared, int64 [B, K]; -1 for first ones, which nothing predicts."""
    columns = compared_columns(blocks) + 1
    owner = np.take_along_axis(blocks.document, columns, 1).astype(np.int64)
    begins = np.take_along_axis(blocks.begins_text(), columns, 1)
    return np.where(begins, -1, owner)


def summary(blocks: TokenBlocks, parts: Sequence[arrays.Float]) -> Displacement | None:
    """Return the statistics of ``VALUES`` of consecutive parts of a text; None if nothing was compared."""
    if not is_measured(parts):
        return None
    values = np.concatenate(parts, axis=1)
    owner = compared_documents(blocks)
    is_predicted = owner >= 0
    if not is_predicted.any():
        return None
    divergence, is_same, delta = values[:, is_predicted]
    owner = owner[is_predicted]
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
