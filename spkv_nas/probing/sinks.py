"""Measure attention sinks: how much attention goes to the first tokens, and how many of them local heads must see.

Pretrained decoders put a large part of their attention on the first tokens of a sequence, above all on its BOS token
(StreamingLLM, arXiv 2309.17453; Gu et al., arXiv 2410.10781; Barbero et al., arXiv 2504.02732). The values there are
near zero, so that this is how a head attends to nothing. A head that loses these tokens to its window must spread that
attention over others, and the model fails. Layouts therefore let local heads see the first N tokens besides their
window, and signals measure what a head needs with these tokens visible.

``measure_sinks`` finds N in one pass over a few blocks, with every head open. It also reports the massive activations
that sinks come with (Sun et al., arXiv 2402.17762): hidden states hundreds of times the median, in a few channels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.artifacts import defaults, local_layers
from spkv_nas.artifacts.probe_record import MassiveActivation
from spkv_nas.base import arrays, distributed, errors
from spkv_nas.data.batches import block_tokens
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import attention, config_section, windows
from spkv_nas.model.placement import input_device
from spkv_nas.probing.heads import attention_weights

NUM_SINKS = (1, 2, 4)  # numbers of sink tokens to choose from
_POSITIONS = 8  # first tokens whose attention is measured
_WITHIN = 4  # first tokens that can be sinks
_MIN_HELD = 0.9
# Other early tokens get .0001 to .0003, sinks that pay off at least .005 (``reports/LOG.md``)
_MIN_EXCESS = 0.002
_MEDIAN_VALUES = 1 << 22  # maximum values that a median is taken of, as it sorts them


@dataclass(frozen=True)
class SinkReport:
    """Attention on the first tokens of a sequence."""

    # float64 [layers, Hq, positions], mean attention weight of a query head on each of the first 8 tokens, over queries
    # that no longer have them in their window. Layers that are local by design are left out, since their heads never
    # see the first tokens
    mass: arrays.Float = field(repr=False)  # long
    num_kv_heads: int  # KV heads per layer, most of them if layers differ
    # Mean attention weight that a token would get if a query attended to all of its keys alike
    average: float
    massive: tuple[MassiveActivation, ...]  # the largest activation of each decoder layer

    @property
    def excess(self) -> arrays.Float:
        """Return the mass [layers, Hq, positions] beyond what a token gets on average, at least 0."""
        return np.maximum(self.mass - self.average, 0.0)

    @property
    def first_mass(self) -> float:
        """Return the share of attention on the first token, mean over all heads."""
        return float(self.mass[..., 0].mean())

    @property
    def kv_mass(self) -> arrays.Float:
        """Return the attention on the first four tokens together by KV head [layers, Hkv], mean over its queries."""
        together = self.mass[..., :_WITHIN].sum(-1)  # [layers, Hq]
        groups = together.shape[1] // self.num_kv_heads
        return np.asarray(together.reshape(len(together), self.num_kv_heads, groups).mean(-1))

    @property
    def num_strong(self) -> int:
        """Return the number of KV heads with more than ``STRONG_SINK`` of their attention on the first four tokens."""
        return int((self.kv_mass > defaults.STRONG_SINK).sum())

    @property
    def largest(self) -> MassiveActivation | None:
        """Return the activation that stands out most from its layer; None if no layer's output could be read."""
        return max(self.massive, key=lambda activation: activation.ratio, default=None)

    @property
    def number(self) -> int:
        """Return the number of sink tokens that local heads need: 0, 1, 2 or 4.

        It is 0 if the first four tokens get less than 0.2 % of attention beyond the average token's share, in the mean
        over heads, and no query head gives them more than 30 %. Otherwise it is the smallest number of first tokens
        that holds 90 % of that excess.
        """
        excess = self.excess[..., :_WITHIN]
        by_position = excess.mean((0, 1))
        if by_position.sum() < _MIN_EXCESS and excess.sum(-1).max() <= defaults.STRONG_SINK:
            return 0
        # Share of the excess that the first tokens hold, by their number
        held = np.cumsum(by_position) / by_position.sum()
        for number in NUM_SINKS:
            if number >= len(held) or held[number - 1] >= _MIN_HELD:
                return number
        return NUM_SINKS[-1]

    def as_mapping(self) -> dict[str, object]:
        """Return the entries for ``probe.yaml``."""
        entries: dict[str, object] = {"sink_mass": round(self.first_mass, 4)}
        if self.number > 1:
            on_sinks = self.mass[..., : self.number].sum(-1)
            entries["sink_tokens_mass"] = round(float(on_sinks.mean()), 4)
        entries["sink_heads"] = self.num_strong
        entries["measured_heads"] = self.kv_mass.size
        entries["massive_activation"] = None
        if self.largest is not None:
            ratio = float(f"{self.largest.ratio:.4g}")
            entries["massive_activation"] = {**self.largest.model_dump(), "ratio": ratio}
        return entries


def choose_sinks(
    model: PreTrainedModel, blocks: TokenBlocks, window: int | None = None
) -> tuple[int, dict[str, object]]:
    """Choose the number of sink tokens of local heads when none is specified; the sibling of ``default_window``.

    A model with a layout keeps its layout's number, and one whose gates keep first tokens theirs. On any other model it
    is measured (``measure_sinks``). Must be called on all ranks, which get the number of the first. Returns (number of
    sink tokens; entries for ``probe.yaml``, empty if they were not measured).
    """
    # Use the number of an existing layout or gates
    layout = config_section.checkpoint_layout(model)
    gates = config_section.gate_config(model)
    if layout is not None:
        return layout.sinks, {}
    if gates is not None and gates.sinks:
        return gates.sinks, {}

    def measure() -> tuple[int, dict[str, object]]:
        report = measure_sinks(model, blocks, window)
        return report.number, report.as_mapping()

    return distributed.on_main(measure)


@torch.inference_mode()
def measure_sinks(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    window: int | None = None,
    *,
    tokens: int = defaults.SINK_TOKENS,
) -> SinkReport:
    """Measure the attention on the first tokens of blocks, with every head open; the model is restored afterwards.

    Memory is that of a forward pass plus a chunk of attention weights (``heads.attention_weights``). ``blocks`` begin
    as the tokenizer begins a text, of which ``tokens``, at least a block, are measured on, beyond ``window`` or
    ``default_window``; of separate documents, the first tokens are those of each. Raises ``UserError``: the model
    cannot be hooked, or its attention is not finite.
    """
    # Choose the blocks and the queries that count
    blocks = blocks.spread(max(1, tokens // blocks.block_size))
    window = windows.default_window(model, blocks.block_size) if window is None else window
    positions = blocks.boundaries.positions(blocks.marked())
    longest = int(positions.max()) + 1  # tokens of a document
    # Position in the document of the first query that counts
    start = max(1, min(window + _POSITIONS, longest - 1))
    # First tokens outside the window of that query
    num_positions = min(_POSITIONS, max(1, start + 1 - window))
    with windows.full_attention(model) as states, _watch_activations(model) as activations:
        candidates = local_layers.candidate_layers(states)
        # Queries beyond a native window do not see the first token
        stop = max(start, min(longest, *(states[layer].checkpoint_window for layer in candidates)))
        # Weights [Hq, positions], summed over queries and blocks
        sums = {layer: torch.zeros(0) for layer in candidates}
        for layer in candidates:
            states[layer].observer = _SinkObserver(
                sums, layer, states[layer], slice(start, stop), num_positions
            )
        # One block by one, to bound memory
        for block in range(blocks.num_blocks):
            inputs = blocks.boundaries.inputs(block_tokens(blocks, block, 1, input_device(model)))
            model.get_decoder()(**inputs, use_cache=False)
        num_kv_heads = max(states[layer].num_kv_heads for layer in candidates)
    # Average the mass over queries and blocks
    queries = positions[(positions >= start) & (positions < stop)]
    totals = np.stack([total.cpu().double().numpy() for total in sums.values()])
    mass = totals / max(1, len(queries))
    if not np.isfinite(mass).all():
        raise errors.UserError(
            f"the model's attention is not finite\n{errors.OVERFLOW} (--dtype float32)"
        )
    average = float((1.0 / (queries + 1)).mean()) if len(queries) else 0.0
    return SinkReport(mass, num_kv_heads, average, tuple(activations.values()))


@dataclass
class _SinkObserver(attention.Observer):
    """Observer that adds a layer's weights on the first keys of documents to ``sums``."""

    knows_documents = True

    sums: dict[int, Tensor]  # layer -> [Hq, positions]
    layer: int
    state: attention.LayerState
    queries: slice  # positions in the document of the queries that count
    num_positions: int  # first keys of a document to look at

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None,
        starts: Tensor | None = None,
    ) -> None:
        """Add the weights of a pass."""
        queries = self.queries
        num_positions = self.num_positions
        total = torch.zeros(q.shape[1], num_positions, device=q.device)
        # First token of each token's document, int [B, T]
        if starts is None:
            stop = queries.stop
            first = torch.zeros(len(q), stop, dtype=torch.long, device=q.device)
        else:
            stop = q.shape[2]
            first = starts
        weights_of_chunks = attention_weights(
            q[:, :, :stop],
            k[:, :, :stop],
            scale,
            window=stop,
            start=queries.start,
            sink_logits=sink_logits,
            starts=starts,
            softcap=self.state.softcap,
        )
        offsets = torch.arange(num_positions, device=q.device)
        for query, weights in weights_of_chunks:
            # Weights on the first keys of each query's document [B, Hkv, G, c, positions]
            index = first[:, query, None] + offsets
            index = index.clamp_max(weights.shape[-1] - 1)[:, None, None]
            on_first = weights.gather(-1, index.expand(*weights.shape[:-1], -1))
            # Count the queries that are far enough from the start of their document
            position = query - first[:, query]
            is_counted = (position >= queries.start) & (position < queries.stop)
            counted = on_first * is_counted[:, None, None, :, None]
            total += counted.sum((0, -2)).flatten(0, 1)  # [Hq, positions]
        before = self.sums[self.layer]
        self.sums[self.layer] = before + total if len(before) else total


def _largest_activation(hidden: Tensor, layer: int) -> MassiveActivation:
    """Return the largest of a layer's hidden states [B, T, C], compared with the median of a sample of them."""
    magnitude = hidden.abs()
    index_in_block = int(magnitude.argmax()) % magnitude[0].numel()
    position, channel = divmod(index_in_block, magnitude.shape[-1])
    every = 1 + magnitude.numel() // _MEDIAN_VALUES
    median = magnitude.flatten(0, 1)[::every].float().median()
    tiny = torch.finfo(torch.float32).tiny
    ratio = float(magnitude.max() / median.clamp_min(tiny))
    return MassiveActivation(layer=layer, ratio=ratio, channel=channel, position=position)


@contextmanager
def _watch_activations(model: nn.Module) -> Iterator[dict[int, MassiveActivation]]:
    """Record the largest activation of every decoder layer with attention, by its index, in the ``with`` block."""
    largest_by_layer: dict[int, MassiveActivation] = {}

    def watch(layer: int) -> Callable[..., None]:
        def see(_module: nn.Module, _args: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not isinstance(hidden, Tensor) or hidden.ndim != 3:
                return
            activation = _largest_activation(hidden, layer)
            known = largest_by_layer.get(layer)
            if known is None or activation.ratio > known.ratio:
                largest_by_layer[layer] = activation

        return see

    # Hook the decoder layer around each attention layer
    names = [name.rpartition(".")[0] for name in attention.attention_layers(model)]
    hooks = [
        model.get_submodule(name).register_forward_hook(watch(layer))
        for layer, name in enumerate(names)
    ]
    try:
        yield largest_by_layer
    finally:
        for hook in hooks:
            hook.remove()
