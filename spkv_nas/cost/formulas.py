"""Count FLOPs, KV-cache bytes and peak memory of a decoder from its sizes; needs no torch.

**FLOPs and cache** (SP-KV paper, appendix "Inference efficiency") depend only on the mean number of keys that a KV head
sees::

    keys  = recent + density * (context - recent),    recent = min(window + sinks, context)
    FLOPs = 2 N + 2 L d_attn keys                     per token, forward
    bytes = 2 L Hkv D element_size keys               of one sequence

Dense attention has density 1; the density of a layout is its share of global heads, and ``window`` here counts its
sink tokens, too. With window 0 these are the paper's equations, which neglect the window. Where layers have a native
sliding window, ``keys`` is the mean over layers, and a layer that is local by design holds its window whatever the
density. Kaplan's attention term is the mean over the positions of a causal sequence of ``context`` tokens; a token
decoded at its end costs twice that term. The predictors, about 4 % of 2 N, are not counted.
No formula predicts the time of attention: see ``spkv_nas.cost.calibration``.

**Memory of passes** counts the values per token and layer that PyTorch's autograd and a Llama's code hold at once; d
and f are the channels of a token and of the FFN, q = Hq D, kv = Hkv D (those expanded from a latent: q), and h the
width of a predictor's hidden layer::

    forward     4 d + max(3 f, 4 q + 4 kv)       of one layer; those of the others are freed
    kept        2 d + 3 f + 2 q + 2 kv            for the backward pass, if only gates are trained
                + d + 2 h                         of a predictor
                + 2 d + f + q                     inputs of linear layers, if these or adapters are trained
                or 5 d + f + q                    if each casts its input
                + 2 d                             if all weights are trained
    backward    2 d + max(4 f, 8 q + 4 kv)        of one layer, in addition to what all layers keep
                or 2 d + 2 f (bfloat16: 4 f)      if only that layer is kept, and freed meanwhile

Norms (2 d of what is kept, 4 d if all weights are trained) and predictors compute in float32, everything else in the
dtype of the pass. In bfloat16 each linear layer casts its input; with float32 weights (autocast) the residual stream
stays float32. With activation checkpointing, layers keep only their input, d, and one layer at a time is recomputed,
after the logits have been freed. Logits are held for a chunk of tokens only (``base.memory``). Not counted
are the activations that adapters keep by their rank, and the allocator's overhead. For other families, what autograd
keeps is within a tenth; for Gemma 3, with twice the norms, it is a quarter more if all weights are trained.
reports/LOG.md compares with measured peaks.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Literal, NamedTuple

from spkv_nas.artifacts import gate_config, grid, local_layers
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import HeadShape, ModelSize, Shape
from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import chunk_tokens

ROOM = 0.9  # share of the available memory for passes; the rest is for allocator and driver
# Share of the free memory that a pass with gradients through a frozen model may use
FROZEN_ROOM = 0.5
# Bytes
FLOAT32 = 4
BFLOAT16 = 2
MOMENTS = 8  # bytes of Adam's two moments per parameter

OptimizerName = Literal[
    "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"
]


class Optimizer(NamedTuple):
    """A variant of AdamW: bytes of both moments per parameter, 0 if paged to CPU memory; its package if not torch."""

    moment_bytes: float = 8.0
    package: str | None = None


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adamw_torch_fused": Optimizer(),
    "adamw_torch": Optimizer(),
    "adamw_8bit": Optimizer(2 * (1 + 4 / 256), "bitsandbytes"),  # a float32 scale for 256 numbers
    "paged_adamw_32bit": Optimizer(0.0, "bitsandbytes"),
    "paged_adamw_8bit": Optimizer(0.0, "bitsandbytes"),
}
DEFAULT_OPTIMIZER: OptimizerName = "adamw_torch_fused"


class Learns(Enum):
    """Trained weights, which determine the gradients that a backward pass computes."""

    GATES = "predictors alone"
    ADAPTERS = "adapters of linear layers, and predictors"
    ALL = "all weights"


def visible_keys(context: int, *, density: float = 1.0, window: int = 0) -> float:
    """Return the keys that a KV head holds: all in the window, a share of those before; ``UserError`` if invalid."""
    if context < 1:
        raise UserError(f"a context must have at least 1 token; found {context}")
    if not 0.0 <= density <= 1.0:
        raise UserError(f"density must lie in [0, 1]; found {density:g}")
    if window < 0:
        raise UserError(f"a window cannot be negative; found {window}")
    recent = min(window, context)
    return recent + density * (context - recent)


def attention_flops(
    shape: HeadShape, context: int, *, density: float = 1.0, window: int = 0
) -> float:
    """Return the forward FLOPs of attention per token, 2 L d_attn keys. Raises ``UserError`` as ``visible_keys``."""
    keys = visible_keys(context, density=density, window=window)
    return 2 * shape.num_layers * shape.attention_width * keys


def flops_per_token(shape: Shape, context: int, *, density: float = 1.0, window: int = 0) -> float:
    """Return the forward FLOPs per token: 2 N for the linear layers, plus attention."""
    attention = attention_flops(shape, context, density=density, window=window)
    return 2 * shape.num_parameters + attention


def training_flops(shape: Shape, num_tokens: float, block_size: int) -> float:
    """Return the FLOPs of training on blocks of ``block_size`` tokens; a backward pass costs two forward passes.

    This reproduces the paper's table "Main scaling study parameters" within 0.5 % (Llama 3 8B: 3.3 % below).
    """
    return 3 * num_tokens * flops_per_token(shape, block_size)


def head_bytes(keys: float, head_dim: int, element_size: int) -> float:
    """Return the bytes of ``keys`` tokens in the cache of one KV head, keys and values: 2 D element_size keys."""
    return 2 * head_dim * element_size * keys


def kv_bytes_per_token(shape: Shape, *, density: float = 1.0, element_size: int = 2) -> float:
    """Return the bytes by which the KV cache grows per token once the window is full."""
    return sum(shape.kv_heads_by_layer) * head_bytes(density, shape.head_dim, element_size)


def kv_cache_bytes(
    shape: Shape, context: int, *, density: float = 1.0, window: int = 0, element_size: int = 2
) -> float:
    """Return the bytes of the KV cache of one sequence of ``context`` tokens."""
    keys = visible_keys(context, density=density, window=window)
    return kv_bytes_per_token(shape, element_size=element_size) * keys


@dataclass(frozen=True)
class Cost:
    """Cost of attention with a share ``density`` of the keys beyond the window."""

    name: str  # name of the model or layout
    # Share of the keys beyond the window, in [0, 1], in the layers that are not local by design
    density: float
    kv_bytes_per_token: float  # growth of the KV cache per token
    kv_cache_bytes: float  # KV cache of one sequence
    attention_flops: float  # forward FLOPs of attention per token
    total_flops: float | None  # forward FLOPs per token; None for a mixture of experts
    # time of attention in all layers per decoded token (``Calibration``); None: unknown
    decode_seconds: float | None = None


def cost(
    name: str,
    shape: Shape,
    context: int,
    *,
    density: float = 1.0,
    window: int = 0,
    native_windows: Sequence[int | None] = (),
    element_size: int = 2,
    layout: Layout | None = None,
) -> Cost:
    """Return the cost of attention with ``context`` tokens in the cache, without times; errors as ``visible_keys``.

    ``density`` is the share of the keys beyond the window, in the layers that are not local by design, and ``window``
    counts sink tokens, too. A ``layout`` replaces ``window``; ``density`` is then its ``layout_density``.
    ``native_windows`` are the sliding windows of the checkpoint's layers, None for full attention; empty: none has one.
    """
    # Windows of the heads of each layer, None: global; without a layout, one window for all heads of a layer
    if layout is None:
        layers = local_layers.config_layers(native_windows or [None])
        keys_of_head = partial(_head_keys, context, density=density, sinks=0)
        rows: Sequence[Sequence[int | None]] = [(window,)] * len(layers)
    else:
        layers = local_layers.config_layers(native_windows or [None] * layout.num_layers)
        keys_of_head = partial(_head_keys, context, density=0.0, sinks=layout.sinks)
        rows = layout.head_windows
    # Average the visible keys over heads, weighted by their sizes
    sizes = _head_sizes(shape, rows)
    heads = [
        (size / max(sizes), keys_of_head(layer, head_window))
        for layer, row, size in zip(layers, rows, sizes, strict=True)
        for head_window in row
    ]
    keys = sum(weight * number for weight, number in heads) / sum(weight for weight, _ in heads)
    # Average the growth of the cache over layers; it stops where a native window is full
    weights = [size * len(row) for size, row in zip(sizes, rows, strict=True)]
    growing = [
        weight
        for weight, layer in zip(weights, layers, strict=True)
        if not layer.is_always_local and context <= layer.checkpoint_window
    ]
    growth = density * sum(growing) / sum(weights)
    flops = 2 * shape.num_layers * shape.attention_width * keys
    return Cost(
        name=name,
        density=density,
        kv_bytes_per_token=kv_bytes_per_token(shape, density=growth, element_size=element_size),
        kv_cache_bytes=kv_bytes_per_token(shape, element_size=element_size) * keys,
        attention_flops=flops,
        total_flops=2 * shape.num_parameters + flops,
    )


def _head_keys(
    context: int, layer: local_layers.ConfigLayer, window: int | None, *, density: float, sinks: int
) -> float:
    """Return the keys that a head with a window holds in a layer; None: a global head."""
    local_window = 0 if window is None else window + sinks
    reach = local_layers.layout_window(layer, local_window, is_global=window is None)
    return visible_keys(min(context, layer.checkpoint_window), density=density, window=reach)


def _head_sizes(shape: Shape, rows: Sequence[Sequence[int | None]]) -> list[float]:
    """Return by layer how many KV heads, counted in those of ``head_dim`` channels, each window of ``rows`` stands for.

    All are 1 if one row stands for all layers.
    """
    if len(rows) != shape.num_layers:
        return [1.0] * len(rows)
    return [number / len(row) for number, row in zip(shape.kv_heads_by_layer, rows, strict=True)]


def layout_density(
    shape: Shape, layout: Layout, native_windows: Sequence[int | None] = ()
) -> float:
    """Return a layout's share of global KV heads in layers that are not local by design; checks that its grid fits."""
    grid.check_grid(
        f"layout '{layout.strategy}'", layout.heads_per_layer, "the model", shape.heads_per_layer
    )
    layers = local_layers.config_layers(native_windows or [None] * layout.num_layers)
    candidates = local_layers.candidate_layers(layers)
    num_global = int(layout.global_mask[candidates].sum())
    return num_global / sum(layout.heads_per_layer[layer] for layer in candidates)


def logit_bytes(vocabulary: int, num_tokens: int, *, item: int, chunk: int | None = None) -> int:
    """Return the peak bytes of a ``chunk_tokens`` of logits, of ``item`` bytes each, their loss and its gradient."""
    # Bytes of the logits, and of their log-softmax, which becomes the gradient; also of the logits in float32
    num_bytes = item + FLOAT32
    if item < FLOAT32:
        num_bytes += FLOAT32
    return min(num_tokens, chunk_tokens(vocabulary, chunk)) * vocabulary * num_bytes


def num_predictor_parameters(size: ModelSize, gates: gate_config.GateConfig) -> int:
    """Return the number of parameters of all gate predictors on a model."""
    channels = size.hidden_size
    heads = size.heads.num_kv_heads
    width = gates.width(size.hidden_size)
    if gates.predictor == "linear":
        per_layer = channels * heads + heads
    else:
        per_layer = channels * width + width + width * heads + heads
    if gates.predictor == "bidirectional":
        per_layer += width * gates.kernel_size + width
    return per_layer * num_gated(size, gates)


def num_adapter_parameters(
    size: ModelSize, rank: int, targets: str | Sequence[str] = "all-linear"
) -> int:
    """Return the number of adapter parameters: per linear layer, the rank times its input plus output channels.

    ``targets`` are names of linear layers as in Llama. If any name is unknown, all linear layers are counted.
    """
    channels = size.hidden_size
    ffn = size.intermediate_size
    q = size.heads.attention_width
    kv = size.heads.kv_width
    # Input plus output channels of every linear layer
    widths = {
        "q_proj": channels + q,
        "o_proj": channels + q,
        "k_proj": channels + kv,
        "v_proj": channels + kv,
        "gate_proj": channels + ffn,
        "up_proj": channels + ffn,
        "down_proj": channels + ffn,
    }
    adapted_layers = set(widths)
    if not isinstance(targets, str) and set(targets) <= set(widths):
        adapted_layers = set(targets)
    return rank * size.num_decoder_layers * sum(widths[name] for name in adapted_layers)


def num_gated(size: ModelSize, gates: gate_config.GateConfig) -> int:
    """Return the number of layers that have a predictor."""
    if gates.heads is None:
        return size.num_full
    return sum(gate_config.GATED in row for row in gates.heads)


@dataclass(frozen=True)
class PassMemory:
    """Memory of passes through a decoder, in addition to its weights."""

    size: ModelSize  # size of the decoder
    item: int = FLOAT32  # bytes of an activation
    gates: gate_config.GateConfig | None = None  # its gates, if any
    attentions: int = 1  # kinds of attention that heads mix, and whose results they keep
    autocast: bool = False  # whether the model's weights are float32 and cast for every product
    on_cpu: bool = False  # whether gated attention computes and stores float32
    # Bytes of a chunk's logits with gradients (``base.memory.chunk_bytes``)
    chunk: int | None = None

    def forward(self, num_tokens: int) -> int:
        """Return the bytes of a pass without gradients, up to the last hidden states."""
        q, kv, _ = self._attention
        largest = max(3 * self.size.intermediate_size, 4 * (q + kv))
        return num_tokens * self.item * (4 * self.size.hidden_size + largest)

    def scored(self, num_tokens: int) -> int:
        """Return the bytes of a pass without gradients and of the NLL of its tokens."""
        hidden = 2 * num_tokens * self.item * self.size.hidden_size
        logits = logit_bytes(self.size.vocabulary, num_tokens, item=self.item)
        return max(self.forward(num_tokens), hidden + logits)

    def shared(self, num_tokens: int, share: float = 1.0) -> int:
        """Return the bytes of scored passes that start from hidden states cached for a ``share`` of the layers."""
        return self.scored(num_tokens) + round(self._hidden(num_tokens) * share)

    def learning(
        self,
        num_tokens: int,
        *,
        learns: Learns = Learns.GATES,
        recomputes: bool = False,
        taught: bool = False,
    ) -> int:
        """Return the bytes of a forward and a backward pass.

        With ``recomputes`` activations are recomputed, one layer at a time. With ``taught`` the loss compares with a
        teacher's predictions, whose logits count too; the teacher's last hidden states are kept.
        """
        kept = self.kept(num_tokens, learns=learns, recomputes=recomputes)
        logits = logit_bytes(self.size.vocabulary, num_tokens, item=self.item, chunk=self.chunk)
        if taught:
            # Also the teacher's hidden states, and its logits, their log-softmax and probabilities
            kept += num_tokens * self.item * self.size.hidden_size
            logits = 5 * logits // 2
        if not recomputes:
            return kept + max(self._backward(num_tokens), logits)
        # Recomputed after the logits are freed
        layer = num_tokens * (self._layer(learns) + self._predictor)
        return kept + max(self._backward(num_tokens, frees=True), logits - layer)

    def kept(
        self, num_tokens: int, *, learns: Learns = Learns.GATES, recomputes: bool = False
    ) -> int:
        """Return the bytes that a forward pass keeps for the backward pass, without logits."""
        size = self.size
        layer = num_tokens * self._layer(learns)
        gate = num_tokens * self._predictor
        last_norm = 2 * num_tokens * FLOAT32 * size.hidden_size
        if recomputes:
            return self._hidden(num_tokens) + layer + gate + last_norm
        gates = 0 if self.gates is None else num_gated(size, self.gates) * gate
        return size.num_decoder_layers * layer + gates + last_norm

    def going(
        self, num_tokens: int, *, learns: Learns = Learns.GATES, recomputes: bool = False
    ) -> int:
        """Return the bytes of ``kept`` that are freed when the backward pass reaches the first layer."""
        layers = self.size.num_decoder_layers
        layer_bytes = num_tokens * self._layer(learns)
        if recomputes:
            layer_bytes = self._hidden(num_tokens) // layers
        return (layers - 1) * layer_bytes

    @property
    def _attention(self) -> tuple[int, int, int]:
        """Return q, kv, and the bytes of an activation in attention."""
        heads = self.size.heads
        item = FLOAT32 if self.on_cpu and self.gates is not None else self.item
        return heads.attention_width, heads.kv_width, item

    @property
    def _predictor(self) -> int:
        """Return the bytes per token that a predictor keeps."""
        if self.gates is None:
            return 0
        channels = self.size.hidden_size
        return FLOAT32 * (channels + 2 * self.gates.width(channels))

    def _layer(self, learns: Learns) -> int:
        """Return the bytes per token that a layer keeps, without its predictor."""
        channels = self.size.hidden_size
        ffn = self.size.intermediate_size
        q, kv, attention_item = self._attention
        norms = FLOAT32 * (4 if learns is Learns.ALL else 2) * channels
        mixed = q * (self.attentions - 1)
        kept = norms + self.item * (3 * ffn + mixed) + attention_item * 2 * (q + kv)
        if learns is Learns.GATES:
            return kept
        # Inputs of linear layers, which are cast in bfloat16
        inputs = (2 if self.item == FLOAT32 else 5) * channels + ffn + q
        return kept + self.item * inputs

    def _backward(self, num_tokens: int, *, frees: bool = False) -> int:
        """Return the bytes of one layer's backward pass; ``frees``: most of what is held is freed meanwhile."""
        q, kv, attention_item = self._attention
        ffn = self.size.intermediate_size
        hidden = self.item * 2 * self.size.hidden_size
        if frees:
            return num_tokens * (hidden + FLOAT32 * 2 * ffn)
        largest = max(self.item * 4 * ffn, attention_item * (8 * q + 4 * kv))
        return num_tokens * (hidden + largest)

    def _hidden(self, num_tokens: int) -> int:
        """Return the bytes of the hidden states between all layers."""
        item = FLOAT32 if self.autocast else self.item
        return num_tokens * item * self.size.hidden_size * self.size.num_decoder_layers


def fitting_pass(
    memory: PassMemory, block_size: int, max_blocks: int, room: float
) -> tuple[int, bool]:
    """Return (blocks per pass, whether to recompute layers) to train gates on a frozen model in ``room`` bytes.

    Layers are recomputed only if the activations of a single block do not fit. At least one block is returned, even if
    it does not fit.
    """
    num_blocks = largest_fit(max_blocks, room, lambda blocks: memory.learning(blocks * block_size))
    if num_blocks:
        return num_blocks, False
    num_blocks = largest_fit(
        max_blocks, room, lambda blocks: memory.learning(blocks * block_size, recomputes=True)
    )
    return max(1, num_blocks), True


def largest_fit(max_blocks: int, room: float, num_bytes: Callable[[int], float]) -> int:
    """Return the largest n <= ``max_blocks`` with ``num_bytes(n)``, which increases with n, at most ``room``; or 0."""
    return bisect.bisect_right(range(1, max_blocks + 1), room, key=num_bytes)
