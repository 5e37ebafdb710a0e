"""Attention mass: the share of a head's attention that falls outside the window.

    mass_h = mean over queries t >= w of  sum over t - s >= w of  softmax_s(q_t . k_s * scale)

The signal that asks nothing of the model but its attention weights. It counts attention that nobody needs, first of
all that on the first tokens of a text ("sinks"); ``sinks`` leaves those keys out of the sum. The G query heads of a KV
head are averaged: the mass says how much of what they read together lies outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attention import LayerState
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.heads import HeadSums, attention_weights, check_window, signal_table


@torch.inference_mode()
def attention_mass(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    sinks: int = 0,
    batch_size: int = 8,
    name: str = "attention-mass",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """The mass of every KV head, by domain, over the queries that have a key outside the window. Collective.

    Args:
        window: w, recent keys that a local head sees, the query's own included.
        sinks: number of first keys of a block whose mass does not count.
        progress: called with (blocks done, in all) of this process.

    Raises:
        UserError: the blocks are not longer than the window, or the model cannot be hooked.
    """
    check_window(blocks, window, sinks)
    with full_attention(model) as states:
        collected = HeadSums(blocks, len(states), states[0].num_kv_heads, model.device)

        def run(_start: int, tokens: Tensor) -> list[Tensor]:
            masses: list[Tensor] = []  # [B, Hkv, T - w] by layer
            for state in states:
                state.observer = _observer(masses, state, window, sinks)
            model.get_decoder()(input_ids=tokens, use_cache=False)
            return masses

        def add(start: int, masses: list[Tensor]) -> None:
            collected.count(start, start + len(masses[0]), slice(window, None))
            for layer, values in enumerate(masses):
                collected.add(layer, values)

        run_own_batches(run, add, blocks, batch_size, model.device, progress)
    collected.add_up()
    facts = {**(metadata or {}), "sinks": sinks}
    return signal_table(
        "attention-mass", collected.means(), window, passes=1.0, tokens=blocks.tokens.size, name=name, metadata=facts
    )


def _observer(masses: list[Tensor], state: LayerState, window: int, sinks: int) -> Any:
    def observe(q: Tensor, k: Tensor, _v: Tensor, scale: float) -> None:
        parts = []
        for query, weights in attention_weights(q, k, scale, window=state.own_window, start=window):
            key = torch.arange(weights.shape[-1], device=q.device)
            far = (query[:, None] - key >= window) & (key >= sinks)
            parts.append((weights * far).sum(-1).mean(2))
        masses.append(torch.cat(parts, -1))

    return observe
