"""Attention mass: the share of a head's attention weight that falls outside the local window.

    mass_h = mean over queries t >= w of  sum over t - s >= w of  softmax_s(q_t . k_s * scale)

This signal needs nothing but attention weights. It also counts attention that carries no information, above all that on
the first tokens of a text (attention sinks); the ``sinks`` option leaves those keys out. The query heads of a KV head
are averaged: its G own ones, and as many of each later layer that reads its keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts import head_scores, kinds, local_layers
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import attention, windows
from spkv_nas.model.placement import input_device
from spkv_nas.probing.heads import HeadSums, attention_weights, signal_table


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
) -> head_scores.HeadScores:
    """Measure the attention mass of every KV head by domain, over all queries that have keys outside the window.

    The window includes the query's own key. The first ``sinks`` keys of each block, or of each of its separate
    documents, are excluded. Must be called on all ranks. Raises ``UserError`` if the model cannot be hooked.
    """
    with windows.full_attention(model) as states:
        heads = attention.heads_per_layer(states)
        device = input_device(model)
        collected = HeadSums(blocks, len(states), max(heads), device)

        # Observe the attention of each layer during a forward pass
        def run(_start: int, tokens: Tensor) -> list[Tensor]:
            # [B, Hkv, T - w] of each layer and its readers
            masses: list[list[Tensor]] = [[] for _ in states]
            for state, layer_masses in zip(states, masses, strict=True):
                state.observer = _MassObserver(layer_masses, state, window, sinks)
            model.get_decoder()(**blocks.boundaries.inputs(tokens), use_cache=False)
            return [
                torch.stack([mass.to(device) for mass in layer_masses]).mean(0)
                for layer_masses in masses
            ]

        # Add the masses to the sums of their documents
        def add(start: int, masses: list[Tensor]) -> None:
            tokens = blocks.marked(slice(start, start + len(masses[0])))
            position = blocks.boundaries.positions(tokens)
            collected.add(start, masses, slice(window, None), position[:, window:] >= window)

        run_own_batches(run, add, blocks, batch_size, device, progress)
    collected.add_up()
    return signal_table(
        "attention-mass",
        collected.means(),
        window,
        passes=1.0,
        tokens=blocks.tokens.size,
        name=name,
        metadata={**(metadata or {}), "sinks": sinks},
        unit=kinds.ATTENTION_UNIT,
        heads_per_layer=heads,
    )


@dataclass
class _MassObserver(attention.Observer):
    """Observer that appends masses [B, Hkv, T - w] of a layer, or its reader, to ``masses``."""

    sees_readers = True
    knows_documents = True

    masses: list[Tensor]
    state: attention.LayerState
    window: int  # of local heads, in keys
    sinks: int  # first keys of a document that do not count

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None,
        starts: Tensor | None = None,
    ) -> None:
        """Compute the masses of a pass."""
        local_window = local_layers.layout_window(self.state, self.window, is_global=False)
        parts = []
        chunks = attention_weights(
            q,
            k,
            scale,
            window=self.state.checkpoint_window,
            start=self.window,
            sink_logits=sink_logits,
            starts=starts,
            softcap=self.state.softcap,
        )
        for query, weights in chunks:
            # Sum the weights of keys outside the window, sinks left out
            key = torch.arange(weights.shape[-1], device=q.device)
            # First key of the query's document
            first = 0 if starts is None else starts[:, query][:, None, None, :, None]
            far = (query[:, None] - key >= local_window) & (key - first >= self.sinks)
            by_query_head = (weights * far).sum(-1).flatten(1, 2)  # [B, Hq, c]
            by_kv_head = torch.stack(by_query_head.chunk(self.state.num_kv_heads, 1), 1)
            parts.append(by_kv_head.mean(2))
        self.masses.append(torch.cat(parts, -1))
