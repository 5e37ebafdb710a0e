"""Gains: the NLL that one head's global attention saves, measured by opening it alone, or by closing it alone.

    opening:  gain_h = NLL(all heads local) - NLL(all heads local but h)
    closing:  gain_h = NLL(all heads global but h) - NLL(all heads global)

Both in nats per token, on the model's own weights, the errors those of the paired difference by document. Opening finds
heads that help by themselves, closing those that no other head replaces: two heads that do the same both gain much when
opened and nothing when closed. A layer is opened or closed as a whole for its own gain, which is not the sum of its
heads'. A gain may be below 0.

Passes share their first layers (``evaluation.zero_shot``), so that a head of layer l costs (L - l) / L of a pass, all
heads about (L + 1) / 2 passes for each of a layer's. Layers that are local by design are opened to their own window at
most: their heads gain nothing where the window is as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.density_rows import NATS
from spkv_nas.artifacts.gains import Gains
from spkv_nas.artifacts.grid import Grid
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import num_own_blocks
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.zero_shot import Windows, score_windows
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.heads import domain_means, signal_table, token_mean

HEAD, LAYER = GRANULARITIES = ("head", "layer")

Unit = tuple[int, range]  # what is opened or closed at once: a layer, and which of its heads


def num_passes(grid: Grid) -> float:
    """Passes over the text for the gains of all heads of a model of (layers, KV heads), and the one before."""
    num_layers, num_heads = grid
    return 1.0 + (num_layers + 1) / 2 * num_heads


def opening(model: PreTrainedModel, blocks: TokenBlocks, window: int, **options: Any) -> DensityTable:
    """What each KV head's global attention saves where all others are local; the options are those of ``gains``."""
    return gains("opening", model, blocks, window, opens=True, **options)


def closing(model: PreTrainedModel, blocks: TokenBlocks, window: int, **options: Any) -> DensityTable:
    """What each KV head's being local costs where all others are global; the options are those of ``gains``."""
    return gains("closing", model, blocks, window, opens=False, **options)


def gains(
    signal: str,
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    opens: bool,
    name: str | None = None,
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> DensityTable:
    """The gain of every KV head, by domain. The model is left as it was.

    Args:
        window: recent keys that a local head sees, the query's own included.
        opens: whether heads are opened in a local model, or closed in a global one.
        options: granularity, batch_size and progress, as ``_measure`` takes them.

    Raises:
        UserError: as ``_measure``.
    """
    found = _measure(model, blocks, window, opens=opens, **options)
    facts = {**(metadata or {}), "unit": NATS, "granularity": found.granularity, "nll_before": found.nll_before}
    return signal_table(
        signal, domain_means(blocks, found.sums, found.num_tokens), window,
        passes=found.passes, tokens=blocks.tokens.size, name=name or signal, metadata=facts,
    )  # fmt: skip


def opening_gains(
    model: PreTrainedModel, blocks: TokenBlocks, window: int, **options: Any
) -> tuple[Gains, dict[str, Any]]:
    """The same opening gains over all domains, to judge a table by, and what they took: passes, tokens, documents.

    Raises:
        UserError: as ``_measure``.
    """
    found = _measure(model, blocks, window, opens=True, **options)
    documents = int((found.num_tokens > 0).sum())
    took = {"passes": round(found.passes, 2), "tokens": blocks.tokens.size, "documents": documents}
    return Gains(*token_mean(found.sums, found.num_tokens)), took


@dataclass(frozen=True)
class _Found:
    """Sums of what is saved [L, Hkv, documents], in nats, over how many tokens [documents], and what it took."""

    sums: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    nll_before: float
    passes: float
    granularity: str


@torch.inference_mode()
def _measure(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    opens: bool,
    granularity: str = HEAD,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> _Found:
    """The gain of every head, by document.

    Args:
        granularity: "head", or "layer": every head of a layer then has the layer's gain divided by its heads, so that
            the sum over them is the layer's own.
        batch_size: blocks per forward pass; at most one hidden state per layer is kept of them.
        progress: called with (blocks done, in all) of this process, of all passes.

    Raises:
        UserError: the blocks are not longer than the window, the model cannot be hooked, or an NLL is not finite.
    """
    if blocks.block_size <= window:
        raise UserError(f"blocks of {blocks.block_size} tokens have nothing outside a window of {window} keys")
    with full_attention(model) as states:
        own = tuple(state.head_windows(gated=False) for state in states)
        local = tuple(tuple(min(window, wide) for wide in row) for row in own)
        before, after = (local, own) if opens else (own, local)
        changed = {unit: _changed(before, after, unit) for unit in _units(before, granularity)}
        ordered = sorted({before, *changed.values()})
        done, total = 0, len(ordered) * num_own_blocks(blocks.num_blocks, batch_size)

        def step(num_blocks: int) -> None:
            nonlocal done
            done += num_blocks
            if progress is not None:
                progress(done, total)

        found, passes = score_windows(model, states, ordered, blocks, batch_size=batch_size, step=step)
    scores = dict(zip(ordered, found, strict=True))
    sums = np.zeros((len(own), len(own[0]), len(blocks.documents)))
    for (layer, heads), windows in changed.items():
        saved = scores[before].total - scores[windows].total
        sums[layer, heads] = (saved if opens else -saved) / len(heads)
    return _Found(sums, scores[before].num_tokens, round(scores[before].mean, 6), passes, granularity)


def _units(windows: Windows, granularity: str) -> list[Unit]:
    """All that is opened or closed in turn. Raises ``UserError`` for an unknown granularity."""
    if granularity == LAYER:
        return [(layer, range(len(row))) for layer, row in enumerate(windows)]
    if granularity != HEAD:
        raise UserError(f"--granularity must be head or layer; found '{granularity}'")
    return [(layer, range(head, head + 1)) for layer, row in enumerate(windows) for head in range(len(row))]


def _changed(before: Windows, after: Windows, unit: Unit) -> Windows:
    """``before``, with the heads of ``unit`` as in ``after``."""
    layer, heads = unit
    row = tuple(after[layer][head] if head in heads else window for head, window in enumerate(before[layer]))
    return (*before[:layer], row, *before[layer + 1 :])
