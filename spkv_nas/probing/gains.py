"""Gains: the NLL that one head's global attention saves, measured by opening it alone, or by closing it alone.

    opening:  gain_h = NLL(all heads local) - NLL(all heads local but h)
    closing:  gain_h = NLL(all heads global but h) - NLL(all heads global)

Both in nats per token, on the model's own weights, the errors those of the paired difference by document. Opening finds
heads that help by themselves, closing those that no other head replaces: two heads that do the same both gain much when
opened and nothing when closed. A layer is opened or closed as a whole for its own gain, which is not the sum of its
heads'. A gain may be below 0. Of a model with many heads, whole layers are measured first, and heads only of those that
gain most (``max_heads``).

Passes share their first layers (``evaluation.zero_shot``), so that a head of layer l costs (L - l) / L of a pass, all
heads about (L + 1) / 2 passes for each of a layer's. Layers that are local by design are opened to their own window at
most: their heads gain nothing where the window is as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts.gains import Gains
from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.head_score_rows import NATS
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.data.batches import num_own_blocks
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.evaluation.zero_shot import Windows, score_windows
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.heads import check_window, domain_means, signal_table

HEAD, LAYER = GRANULARITIES = ("head", "layer")
MIXED = "mixed"  # heads of some layers, and whole layers

Unit = tuple[int, range]  # what is opened or closed at once: a layer, and which of its heads


def num_passes(grid: Grid) -> float:
    """Passes over the text for the gains of all heads of a model of (layers, KV heads), and the one before."""
    num_layers, num_heads = grid
    return 1.0 + (num_layers + 1) / 2 * num_heads


def opening(model: PreTrainedModel, blocks: TokenBlocks, window: int, **options: Any) -> HeadScores:
    """What each KV head's global attention saves where all others are local; the options are those of ``gains``."""
    return gains("opening", model, blocks, window, opens=True, **options)


def closing(model: PreTrainedModel, blocks: TokenBlocks, window: int, **options: Any) -> HeadScores:
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
) -> HeadScores:
    """The gain of every KV head, by domain. The model is left as it was.

    Args:
        window: recent keys that a local head sees, the query's own included.
        opens: whether heads are opened in a local model, or closed in a global one.
        options: granularity, max_heads, batch_size and progress, as ``_measure`` takes them.

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
    return Gains(*jackknife_ratio(found.sums, found.num_tokens)), took


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
    max_heads: int | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> _Found:
    """The gain of every head, by document.

    Args:
        granularity: "head", or "layer": every head of a layer then has the layer's gain divided by its heads, so that
            the sum over them is the layer's own.
        max_heads: heads measured by themselves, of the layers that gain most as wholes; the others' are as with
            "layer". None or enough for all: every head, and no whole layer. At least a layer's.
        batch_size: blocks per forward pass; at most one hidden state per layer is kept of them.
        progress: called with (blocks done, in all) of this process, of all passes.

    Raises:
        UserError: the blocks are not longer than the window, the model cannot be hooked, an NLL is not finite, or
            ``max_heads`` are fewer than a layer has, or do not go with the granularity.
    """
    check_window(blocks, window)
    if granularity not in GRANULARITIES:
        raise UserError(f"--granularity must be head or layer; found '{granularity}'")
    if max_heads is not None and granularity == LAYER:
        raise UserError("--max-heads chooses layers whose heads are measured; --granularity layer measures none")
    with full_attention(model) as states:
        own = tuple(state.head_windows(gated=False) for state in states)
        num_layers, num_heads = len(own), len(own[0])
        detailed = num_layers if max_heads is None else min(max_heads // num_heads, num_layers)
        if detailed == 0:
            raise UserError(f"--max-heads {max_heads} measures no layer: each has {num_heads} KV heads")
        local = tuple(tuple(min(window, wide) for wide in row) for row in own)
        rounds = _Rounds(
            partial(score_windows, model, states, blocks=blocks, batch_size=batch_size), local, own, opens,
            num_own_blocks(blocks.num_blocks, batch_size), progress,
        )  # fmt: skip
        sums = np.zeros((num_layers, num_heads, len(blocks.documents)))
        by_layer = granularity == LAYER or detailed < num_layers
        if by_layer:
            layers: list[Unit] = [(layer, range(num_heads)) for layer in range(num_layers)]
            for (layer, _), gain in rounds.gains(layers, 0 if granularity == LAYER else detailed * num_heads):
                sums[layer] = gain / num_heads
        if granularity == HEAD:
            most = sorted(np.argsort(-sums.sum((1, 2)), kind="stable")[:detailed].tolist())
            for (layer, heads), gain in rounds.gains([(x, range(y, y + 1)) for x in most for y in range(num_heads)]):
                sums[layer, heads] = gain
    base = rounds.scores[rounds.before]
    what = granularity if by_layer is (granularity == LAYER) else MIXED
    return _Found(sums, base.num_tokens, round(base.mean, 6), round(rounds.passes, 2), what)


@dataclass
class _Rounds:
    """Gains of units in one round after another, nothing scored twice.

    Attributes:
        score: the NLL of windows in order, and the passes that it took; told of its steps by ``step``.
        local, whole: windows of all heads where all are local, and where none is.
        opens: whether units are opened in the local model, or closed in the other.
        num_blocks: of a pass, in this process.
    """

    score: Callable[..., tuple[list[DocumentNLL], float]]
    local: Windows
    whole: Windows
    opens: bool
    num_blocks: int
    progress: Progress | None
    scores: dict[Windows, DocumentNLL] = field(default_factory=dict)
    passes: float = 0.0
    _done: int = 0
    _total: int = 0

    @property
    def before(self) -> Windows:
        """Of what no unit has changed."""
        return self.local if self.opens else self.whole

    def gains(self, units: Sequence[Unit], later: int = 0) -> Iterator[tuple[Unit, NDArray[np.float64]]]:
        """Each unit with what it gains [documents], in nats; ``later``: at most so many windows come after these."""
        after = self.whole if self.opens else self.local
        changed = {unit: _changed(self.before, after, unit) for unit in units}
        ordered = sorted({self.before, *changed.values()} - self.scores.keys())
        self._total = self._done + (len(ordered) + later) * self.num_blocks
        if ordered:
            found, took = self.score(ordered, step=self._step)
            self.scores.update(zip(ordered, found, strict=True))
            self.passes += took
        sign = 1 if self.opens else -1
        for unit, windows in changed.items():
            yield unit, sign * (self.scores[self.before].total - self.scores[windows].total)

    def _step(self, num_blocks: int) -> None:
        self._done += num_blocks
        if self.progress is not None:
            self.progress(self._done, self._total)


def _changed(before: Windows, after: Windows, unit: Unit) -> Windows:
    """``before``, with the heads of ``unit`` as in ``after``."""
    layer, heads = unit
    row = tuple(after[layer][head] if head in heads else window for head, window in enumerate(before[layer]))
    return (*before[:layer], row, *before[layer + 1 :])
