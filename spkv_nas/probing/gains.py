"""Single-head ablations: the NLL that a head's global attention saves, adding it alone or removing it alone.

    add-one-head:     gain_h = NLL(all heads local) - NLL(all heads local but h)
    leave-one-out:    gain_h = NLL(all heads global but h) - NLL(all heads global)

Both are in nats per token, on the unchanged weights, with standard errors of the paired difference over documents.
The first finds heads that help on their own; the second finds heads that no other head can replace. Two redundant heads
both have a large add-one-head gain and no leave-one-out gain. A whole layer's gain is measured by switching all of its
heads at once and is not the sum of theirs. Gains may be negative. ``max_heads`` limits the cost on large models: whole
layers are measured first, then single heads of the layers with the largest gains only.

Forward passes share their first layers (``evaluation.zero_shot``): a head of layer l costs (L - l) / L of a pass, and
all heads cost about (L + 1) / 2 passes per head of a layer. Sliding-window layers are opened to their native window at
most, so their heads gain nothing if the local window is at least as long.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts import grid, head_scores, head_tables, kinds, local_layers
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.data.batches import num_own_blocks
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import paired, zero_shot
from spkv_nas.model.attention import LayerState
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.heads import check_window, domain_means, signal_table

MIXED = "mixed"  # single heads in some layers, whole layers elsewhere

Unit = tuple[int, range]  # heads switched together: layer and KV heads


def gains(
    signal: str,
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int,
    *,
    opens: bool,
    name: str | None = None,
    metadata: dict[str, object] | None = None,
    **options: Any,
) -> head_scores.HeadScores:
    """Measure the gain of every KV head by domain; the model is restored afterwards.

    ``signal`` names the table, "add-one-head" or "leave-one-out", unless ``name`` does. ``options`` are those of
    ``_measure``, other arguments those of ``probe``. Raises ``UserError``: the model cannot be hooked, an NLL is not
    finite, or the options do not fit the model or each other.
    """
    measured = _measure(model, blocks, window, opens=opens, **options)
    facts = {"granularity": measured.granularity, "nll_before": measured.nll_before}
    return signal_table(
        signal,
        domain_means(blocks, measured.sums, measured.num_tokens),
        window,
        passes=measured.passes,
        tokens=blocks.tokens.size,
        name=name or signal,
        metadata={**(metadata or {}), **facts},
        kind=kinds.GAIN,
        unit=kinds.NATS,
        heads_per_layer=measured.heads_per_layer,
    )


def add_one_head_gains(
    model: PreTrainedModel, blocks: TokenBlocks, window: int, **options: Any
) -> tuple[head_tables.Gains, dict[str, float]]:
    """Measure add-one-head gains over all domains together, as ground truth for the ranking of another table.

    Returns:
        The gains, and the cost of the measurement: passes, tokens and documents.

    Raises ``UserError``: as in ``gains``.
    """
    check_window(blocks, window, options.get("sinks", 0))
    measured = _measure(model, blocks, window, opens=True, **options)
    documents = int((measured.num_tokens > 0).sum())
    cost = {
        "passes": round(measured.passes, 2),
        "tokens": blocks.tokens.size,
        "documents": documents,
    }
    is_head = grid.head_cells(measured.heads_per_layer)
    means, errors = jackknife_ratio(measured.sums, measured.num_tokens)
    values = np.where(is_head, means, np.nan)
    standard_error = np.where(is_head, errors, np.nan)
    return head_tables.Gains(values, standard_error), cost


@dataclass(frozen=True)
class _Measurement:
    """Gains summed by document in nats [L, Hkv, documents], tokens [documents], and the cost of measuring them."""

    sums: NDArray[np.float64]
    heads_per_layer: tuple[int, ...]
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
    sinks: int = 0,
    granularity: str = kinds.HEAD,
    max_heads: int | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> _Measurement:
    """Measure the gain of every head by document; model, text and window are those of ``probe``.

    With ``opens`` heads become global in an all-local model, else local in an all-global one; local heads see the first
    ``sinks`` tokens as well. The granularity "head" measures single heads; "layer" measures whole layers and divides
    each gain evenly among the layer's heads. ``max_heads`` is the maximum number of heads to measure individually, in
    the layers with the largest gains; the others share their layer's gain. It is at least one layer's heads; None
    measures every head. A forward pass has ``batch_size`` blocks, of which at most one hidden state per layer is kept.
    ``progress`` is called with (blocks done, total) of this rank, over all passes. Raises ``UserError``: the model
    cannot be hooked, an NLL is not finite, or ``max_heads`` is less than one layer has or is combined with granularity
    "layer".
    """
    _check_heads(granularity, max_heads)
    with full_attention(model) as states:
        # Windows [L][Hkv] of the all-global and the all-local model
        native = tuple(state.head_windows(gated=False) for state in states)
        local = _local_windows(states, window)
        rounds = _Rounds(
            score=partial(
                zero_shot.score_windows,
                model,
                states,
                blocks=blocks,
                batch_size=batch_size,
                sinks=sinks,
            ),
            local=local,
            whole=native,
            opens=opens,
            num_blocks=num_own_blocks(blocks.num_blocks, batch_size),
            progress=progress,
        )
        heads_per_layer = tuple(map(len, native))
        sums = np.zeros((len(native), max(heads_per_layer), len(blocks.documents)))
        if granularity == kinds.LAYER:
            _measure_layers(rounds, heads_per_layer, sums)
        else:
            granularity = _measure_top_layers(rounds, heads_per_layer, sums, max_heads)
    base = rounds.scores[rounds.before]
    return _Measurement(
        sums=sums,
        heads_per_layer=heads_per_layer,
        num_tokens=base.num_tokens,
        nll_before=round(base.mean, 6),
        passes=round(rounds.passes, 2),
        granularity=granularity,
    )


def _local_windows(states: Sequence[LayerState], window: int) -> zero_shot.Windows:
    """Return the windows [L][Hkv] of the all-local model."""
    reaches = [local_layers.layout_window(state, window, is_global=False) for state in states]
    return tuple(
        (reach,) * state.num_kv_heads for reach, state in zip(reaches, states, strict=True)
    )


def _measure_top_layers(
    rounds: "_Rounds",
    heads_per_layer: tuple[int, ...],
    sums: NDArray[np.float64],
    max_heads: int | None,
) -> str:
    """Measure at most ``max_heads`` single heads into ``sums``, in the layers with the largest gains, or all of them.

    Returns the granularity. Raises ``UserError``: the maximum is less than one layer has.
    """
    num_layers = len(heads_per_layer)
    if max_heads is None:
        _measure_heads(rounds, heads_per_layer, sums, num_layers)
        return kinds.HEAD
    num_heads = max(heads_per_layer)
    num_detailed = max_heads // num_heads
    if num_detailed == 0:
        raise UserError(
            f"--max-heads {max_heads} is too small: give at least {num_heads}, the heads of a layer"
        )
    if num_detailed >= num_layers:
        _measure_heads(rounds, heads_per_layer, sums, num_layers)
        return kinds.HEAD
    _measure_layers(rounds, heads_per_layer, sums, later=num_detailed * num_heads)
    _measure_heads(rounds, heads_per_layer, sums, num_detailed)
    return MIXED


def _measure_layers(
    rounds: "_Rounds",
    heads_per_layer: tuple[int, ...],
    sums: NDArray[np.float64],
    later: int = 0,
) -> None:
    """Measure the gains of whole layers into ``sums``, divided evenly among heads; ``later`` as in ``gains``."""
    layers = [(layer, range(number)) for layer, number in enumerate(heads_per_layer)]
    for (layer, heads), gain in rounds.gains(layers, later):
        sums[layer, heads] = gain / len(heads)


def _measure_heads(
    rounds: "_Rounds",
    heads_per_layer: tuple[int, ...],
    sums: NDArray[np.float64],
    num_layers: int,
) -> None:
    """Measure the gains of single heads into ``sums``, in the ``num_layers`` with the largest gains there so far."""
    by_gain = np.argsort(-sums.sum((1, 2)), kind="stable")
    heads = [
        (layer, range(head, head + 1))
        for layer in sorted(by_gain[:num_layers].tolist())
        for head in range(heads_per_layer[layer])
    ]
    for (layer, head), gain in rounds.gains(heads):
        sums[layer, head] = gain


def _check_heads(granularity: str, max_heads: int | None) -> None:
    """Raise ``UserError`` if the granularity is unknown, or does not go with a maximum of single heads."""
    if granularity not in kinds.GRANULARITIES:
        raise UserError(f"--granularity must be head or layer; found '{granularity}'")
    if max_heads is not None and granularity == kinds.LAYER:
        raise UserError(
            "--max-heads limits the single heads to measure; --granularity layer measures none: "
            "give one"
        )


@dataclass
class _Rounds:
    """Measurer of unit gains in successive rounds, which scores no set of windows twice."""

    # function that returns the NLLs of a sequence of windows and the passes used; calls ``step`` as it runs
    score: Callable[..., tuple[list[paired.DocumentNLL], float]]
    local: zero_shot.Windows  # windows of all heads in the all-local model
    whole: zero_shot.Windows  # windows of all heads in the all-global model
    # True to make units global in the all-local model, False to make them local in the all-global one
    opens: bool
    num_blocks: int  # blocks per pass on this rank
    progress: Progress | None  # called with (blocks done, total) of this rank
    # NLLs measured so far
    scores: dict[zero_shot.Windows, paired.DocumentNLL] = field(default_factory=dict)
    passes: float = 0.0  # forward passes used so far
    _done: int = 0
    _total: int = 0

    @property
    def before(self) -> zero_shot.Windows:
        """Return the windows of the unchanged model."""
        return self.local if self.opens else self.whole

    def gains(
        self, units: Sequence[Unit], later: int = 0
    ) -> Iterator[tuple[Unit, NDArray[np.float64]]]:
        """Yield units with gains by document in nats; at most ``later`` windows follow in later rounds."""
        # Score the windows that are new
        after = self.whole if self.opens else self.local
        changed = {unit: _changed(self.before, after, unit) for unit in units}
        ordered = sorted({self.before, *changed.values()} - self.scores.keys())
        self._total = self._done + (len(ordered) + later) * self.num_blocks
        if ordered:
            scored, passes = self.score(ordered, step=self._step)
            self.scores.update(zip(ordered, scored, strict=True))
            self.passes += passes
        # Difference from the unchanged model
        sign = 1 if self.opens else -1
        for unit, windows in changed.items():
            yield unit, sign * (self.scores[self.before].total - self.scores[windows].total)

    def _step(self, num_blocks: int) -> None:
        self._done += num_blocks
        if self.progress is not None:
            self.progress(self._done, self._total)


def _changed(before: zero_shot.Windows, after: zero_shot.Windows, unit: Unit) -> zero_shot.Windows:
    """Return ``before`` with the windows of the heads in ``unit`` taken from ``after``."""
    layer, heads = unit
    row = list(before[layer])
    for head in heads:
        row[head] = after[layer][head]
    return (*before[:layer], tuple(row), *before[layer + 1 :])
