"""Train the gates of a signal on a frozen model: freezing, micro-batches, learning rate, checks, and the table.

The blocks of each step are sharded across ranks (torchrun); ranks beyond the number of blocks per step stay idle. Where
a signal measures how much of several kinds of attention a head needs, a ``Mixture`` mixes them by head::

    out_h = sum_k share_hk out_hk,   kinds: local attention with one window or several, and global attention

With shares of 0 and 1 this is the attention of a layout.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from spkv_kernels import attention
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts import defaults, head_scores, local_layers
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.base import arrays, distributed, errors
from spkv_nas.base.memory import AdaptiveBatchSize, Result, chunk_bytes
from spkv_nas.cost.formulas import FROZEN_ROOM, PassMemory, fitting_pass
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import model_shape, modes, weights
from spkv_nas.model.attention import LayerState, Observer
from spkv_nas.model.placement import input_device
from spkv_nas.probing.heads import HeadMeans, signal_table


@contextmanager
def frozen(model: torch.nn.Module, learning: Collection[torch.nn.Parameter] = ()) -> Iterator[None]:
    """Freeze all parameters of ``model`` except those in ``learning`` inside the ``with`` block.

    Raises ``UserError``: gradients would have to pass through weights that are on no device.
    """
    weights.check_placed(model)
    others = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter not in learning
    ]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


@contextmanager
def frozen_within_memory(
    model: PreTrainedModel,
    length: int,
    num_blocks: int,
    learning: Collection[torch.nn.Parameter] = (),
    gates: GateConfig | None = None,
    *,
    attentions: int = 1,
    steps: int = 0,
) -> Iterator[AdaptiveBatchSize]:
    """Freeze ``model`` as ``frozen``, recompute activations if memory is short, and yield the micro-batch size.

    A step has ``num_blocks`` of ``length`` tokens; ``gates`` are being trained, or every layer mixes ``attentions``
    kinds. Layers are compiled where that pays for ``steps`` (``modes.compiled_if_faster``).
    """
    with frozen(model, learning):
        pass_size, recomputes = passes(model, length, num_blocks, gates, attentions=attentions)
        num_tokens = steps * num_blocks * length // distributed.num_processes()
        with (
            modes.recomputed(model) if recomputes else nullcontext(),
            modes.compiled_if_faster(model, num_tokens),
        ):
            yield AdaptiveBatchSize(pass_size)


def passes(
    model: PreTrainedModel,
    length: int,
    step_blocks: int,
    gates: GateConfig | None = None,
    *,
    attentions: int = 1,
) -> tuple[int, bool]:
    """Choose the blocks per pass and whether to recompute activations, so that a pass fits the free memory.

    The arguments are those of ``frozen_within_memory``; ``gates`` and ``attentions`` as in ``PassMemory``.
    """
    device = str(input_device(model))
    memory = PassMemory(
        size=model_shape.model_size(model),
        item=int(model.dtype.itemsize),
        gates=gates,
        attentions=attentions,
        on_cpu=device == "cpu",
        chunk=chunk_bytes(device),
    )
    return fitting_pass(memory, length, step_blocks, FROZEN_ROOM * weights.memory_for_passes(model))


def blocks_per_step(blocks: TokenBlocks, step_tokens: int) -> int:
    """Return the number of blocks in a step of ``step_tokens`` tokens, rounded down, but at least one."""
    return min(blocks.num_blocks, max(1, step_tokens // blocks.block_size))


def rank_tokens(blocks: TokenBlocks, indices: arrays.Int, device: torch.device) -> Tensor:
    """Return this rank's part, int64 [B, T], B may be 0, of the blocks with ``indices``, the same on all ranks.

    They are marked, as those of ``batches.block_tokens``.
    """
    share = distributed.own_share(len(indices))
    tokens = blocks.marked(indices[share.start : share.stop])
    return torch.from_numpy(tokens.astype(np.int64)).to(device)


def run_micro_batches(
    run: Callable[[Iterator[Tensor]], Result], tokens: Tensor, micro_batch: AdaptiveBatchSize
) -> Result:
    """Call ``run`` with micro-batches of ``tokens`` [B, T], also none, from zero with smaller ones if out of memory."""

    def run_all(size: int) -> Result:
        return run(part for part in torch.split(tokens, size) if len(part))

    return micro_batch.run(run_all, max(1, len(tokens)))


def ramp(step: int, steps: int) -> float:
    """Return the learning-rate factor: linear warm-up and decay over a fifth of the steps each, at least 0.1."""
    fifth = max(1, steps // 5)
    warm_up = (step + 1) / fifth
    decay = (steps - step) / fifth
    return min(1.0, max(warm_up, 0.1), max(decay, 0.1))


def check_finite(what: str, loss: float, step: int, gradient: Tensor | None = None) -> None:
    """Raise ``UserError`` if a step's loss, or its gradient, is not finite; ``what`` names the loss."""
    is_finite = math.isfinite(loss)
    if is_finite and gradient is not None:
        is_finite = bool(gradient.isfinite().all())
    if not is_finite:
        raise errors.UserError(
            f"{what} is {loss} at step {step}\n{errors.OVERFLOW} (--dtype float32)"
        )


def learned_table(
    signal: str,
    unit: str,
    values: arrays.Float,
    blocks: TokenBlocks,
    window: int,
    tokens_seen: int,
    *,
    name: str,
    metadata: Mapping[str, object],
    heads_per_layer: Sequence[int],
) -> head_scores.HeadScores:
    """Build the table of a signal learned on all domains of ``blocks`` together, from its scores ``values`` [L, Hkv].

    ``tokens_seen`` are those of all steps; other arguments and errors are those of ``signal_table``.
    """
    num_tokens = blocks.tokens.size
    return signal_table(
        signal,
        [HeadMeans(values, "all", tokens_seen, 0)],
        window,
        unit=unit,
        passes=defaults.FROZEN_STEP_PASSES * tokens_seen / num_tokens,
        tokens=num_tokens,
        name=name,
        metadata=metadata,
        heads_per_layer=heads_per_layer,
    )


class Mixture(Observer):
    """Attention observer of one layer."""

    sees_readers = True  # replaces attention also in layers that read the keys of this one
    knows_documents = True  # takes ``starts``

    def __init__(
        self, state: LayerState, shares: Tensor, windows: Sequence[int], sinks: int
    ) -> None:
        """Mix what local heads of a layout see in a layer with each of ``windows`` and ``sinks``, and a global head."""
        self._state = state
        # Window and sink tokens of each kind of attention, global attention last
        self._kinds: list[tuple[int, int]] = []
        for window in windows:
            reach = local_layers.layout_window(state, window, is_global=False)
            takes_sinks = local_layers.takes_sinks(state, reach)
            self._kinds.append((reach, sinks if takes_sinks else 0))
        self._kinds.append((state.checkpoint_window, 0))
        # float [Hkv, K] or [B, Hkv, K], share of each kind by KV head, of global attention last
        self.shares = shares

    @classmethod
    def of_global(cls, state: LayerState, share: Tensor, window: int, sinks: int) -> "Mixture":
        """Mix local attention with one window with a ``share`` [Hkv] of global attention."""
        return cls(state, torch.stack([1.0 - share, share], -1), [window], sinks)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention output [B, Hq, T, D], in the wider dtype of the shares and the queries.

        q is [B, Hq, T, D], k and v are [B, Hkv, T, D], ``sink_logits`` are the model's learned sinks [Hq], and
        ``starts`` the position at which each token's document starts, int [B, T].
        """
        # One copy for all kinds
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
        return self.mix(
            self.attend(kind, q, k, v, scale, sink_logits, starts)
            for kind in range(len(self._kinds))
        )

    def attend(
        self,
        kind: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None,
        starts: Tensor | None,
    ) -> Tensor:
        """Compute one kind of attention; -1 is global. Other arguments as in ``__call__``."""
        window, sinks = self._kinds[kind]
        return attention(
            q,
            k,
            v,
            window=window,
            sinks=sinks,
            sink_logits=sink_logits,
            starts=starts,
            scale=scale,
            softcap=self._state.softcap,
        )

    def mix(self, outputs: Iterable[Tensor]) -> Tensor:
        """Mix the attention outputs of all kinds, each [B, Hq, T, D], by the shares of each query head's KV head."""
        mixed = torch.zeros(())
        for kind, output in enumerate(outputs):
            mixed = mixed.to(output.device) + _weighted(output, self.shares[..., kind])
        return mixed


def _weighted(output: Tensor, share: Tensor) -> Tensor:
    """Return an attention output [B, Hq, T, D] times a ``share`` of each KV head [..., Hkv]."""
    share = share.to(output.device)
    num_queries = output.shape[1] // share.shape[-1]  # query heads of a KV head
    by_query = share.repeat_interleave(num_queries, -1)
    return by_query[..., None, None] * output


class Differences(Observer):
    """Attention observer of one layer that adds, for each window, a share of what it changes to the layer's attention.

    The shares are 0, so the attention stays what it is, and their gradients say what the loss does when a head moves
    from global attention towards each window. Only the attention itself has gradients, not the windows, so that many
    windows cost little more than one forward pass.
    """

    sees_readers = True  # replaces attention also in layers that read the keys of this one
    knows_documents = True  # takes ``starts``

    def __init__(
        self,
        state: LayerState,
        shares: Tensor,
        windows: Sequence[int],
        sinks: int,
        *,
        is_halfway: bool,
    ) -> None:
        """Attend globally, or halfway between that and the last of ``windows``.

        ``shares`` are zeros, float [B, Hkv, W], one for each window, in which local heads also see ``sinks``.
        """
        self._kinds = Mixture(state, shares, windows, sinks)
        self._shares = shares
        self._is_halfway = is_halfway

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention output [B, Hq, T, D]; arguments as in ``Mixture``."""
        # One copy for all kinds
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()

        def attend(kind: int) -> Tensor:
            return self._kinds.attend(kind, q, k, v, scale, sink_logits, starts)

        unchanged = attend(-1)
        output = unchanged
        num_windows = self._shares.shape[-1]
        if self._is_halfway:
            output = (unchanged + attend(num_windows - 1)) / 2
        for kind in range(num_windows):
            with torch.no_grad():
                difference = attend(kind) - unchanged
            output = output + _weighted(difference, self._shares[..., kind])
        return output
