"""Peak memory of forward and backward passes of a decoder, from formulas; needs no torch.

The formulas count the values per token and layer that PyTorch's autograd and a Llama's code hold at once. d and f are
the channels of a token and of the FFN, q = Hq D, kv = Hkv D, and h the width of the predictor's hidden layer::

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
after the logits have been freed. Logits are never held for all tokens, only for a chunk
(``base.memory.CHUNK_BYTES``). Kernels need little, as attention's memory is linear in the tokens. Not counted are the
activations that adapters keep by their rank, and the allocator's overhead. For other model families, what autograd
keeps is within a tenth; for Gemma 3, which has twice the norms, it is a quarter more if all weights are trained.
reports/LOG.md compares with measured peaks.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from spkv_nas.artifacts.gate_config import GATED, GateConfig
from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.base.memory import chunk_tokens

ROOM = 0.9  # share of the available memory for passes; the rest is for allocator and driver
FLOAT32 = 4  # bytes
BFLOAT16 = 2
MOMENTS = 8  # bytes of Adam's two moments per parameter

OptimizerName = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"]

BITSANDBYTES = "bitsandbytes"
_BLOCK = 256  # 8-bit numbers per float32 scale


@dataclass(frozen=True)
class Optimizer:
    """A variant of AdamW.

    Attributes:
        moment_bytes: bytes of both moments per parameter on the device; 0 if paged, as they may be in CPU memory.
        package: package that provides it, if not torch.
    """

    moment_bytes: float = 8.0
    package: str | None = None


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adamw_torch_fused": Optimizer(),
    "adamw_torch": Optimizer(),
    "adamw_8bit": Optimizer(2 * (1 + 4 / _BLOCK), BITSANDBYTES),
    "paged_adamw_32bit": Optimizer(0.0, BITSANDBYTES),
    "paged_adamw_8bit": Optimizer(0.0, BITSANDBYTES),
}
DEFAULT_OPTIMIZER: OptimizerName = "adamw_torch_fused"


class Learns(Enum):
    """Trained weights, which determine the gradients that a backward pass computes."""

    GATES = "predictors alone"
    ADAPTERS = "adapters of linear layers, and predictors"
    ALL = "all weights"


def logit_bytes(vocabulary: int, num_tokens: int, *, item: int, learns: bool = False) -> int:
    """Return the peak bytes of the logits of ``num_tokens`` and of their loss.

    Args:
        vocabulary: vocabulary size V.
        num_tokens: tokens of the pass; at most a chunk's count.
        item: bytes of a logit as the model computes it.
        learns: whether to include the gradient.
    """
    copies = (8 if learns else 4) + (4 if item < FLOAT32 else 0)  # log-softmax, its gradient, the logits in float32
    return min(num_tokens, chunk_tokens(vocabulary)) * vocabulary * (item + copies)


def num_predictor_parameters(size: ModelSize, gates: GateConfig) -> int:
    """Return the number of parameters of all gate predictors on a model."""
    channels, heads, width = size.hidden_size, size.heads.num_kv_heads, gates.width(size.hidden_size)
    per_layer = (channels if gates.predictor == "linear" else width) * heads + heads
    if gates.predictor != "linear":
        per_layer += channels * width + width
    if gates.predictor == "bidirectional":
        per_layer += width * gates.kernel_size + width
    return per_layer * num_gated(size, gates)


def num_adapter_parameters(size: ModelSize, rank: int, targets: str | Sequence[str] = "all-linear") -> int:
    """Return the number of adapter parameters: per linear layer, the rank times its input plus output channels.

    Args:
        size: size of the decoder.
        rank: rank of the adapters.
        targets: names of linear layers as in Llama. If any name is unknown, all linear layers are counted.
    """
    channels, ffn = size.hidden_size, size.intermediate_size
    q, kv = size.heads.attention_width, size.heads.num_kv_heads * size.heads.head_dim
    widths = dict.fromkeys(("q_proj", "o_proj"), channels + q) | dict.fromkeys(("k_proj", "v_proj"), channels + kv)
    widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), channels + ffn)
    adapted_layers = set(widths) if isinstance(targets, str) or not set(targets) <= set(widths) else set(targets)
    return rank * size.heads.num_layers * sum(widths[name] for name in adapted_layers)


def num_gated(size: ModelSize, gates: GateConfig) -> int:
    """Return the number of layers that have a predictor."""
    return size.num_full if gates.heads is None else sum(GATED in row for row in gates.heads)


@dataclass(frozen=True)
class PassMemory:
    """Memory of passes through a decoder, in addition to its weights.

    Attributes:
        size: size of the decoder.
        item: bytes of an activation.
        gates: its gates, if any.
        mixes: whether heads mix global and local attention and keep both results.
        autocast: whether the model's weights are float32 and cast for every product.
        on_cpu: whether gated attention computes and stores float32.
    """

    size: ModelSize
    item: int = FLOAT32
    gates: GateConfig | None = None
    mixes: bool = False
    autocast: bool = False
    on_cpu: bool = False

    def forward(self, num_tokens: int) -> int:
        """Return the bytes of a pass without gradients, up to the last hidden states."""
        q, kv = self._attention
        size = self.size
        return num_tokens * self.item * (4 * size.hidden_size + max(3 * size.intermediate_size, 4 * (q + kv)))

    def scored(self, num_tokens: int) -> int:
        """Return the bytes of a pass without gradients and of the NLL of its tokens."""
        hidden = 2 * num_tokens * self.item * self.size.hidden_size
        return max(self.forward(num_tokens), hidden + logit_bytes(self.size.vocabulary, num_tokens, item=self.item))

    def shared(self, num_tokens: int, share: float = 1.0) -> int:
        """Return the bytes of scored passes that start from hidden states cached for a ``share`` of the layers."""
        return self.scored(num_tokens) + round(self._hidden(num_tokens) * share)

    def learning(
        self, num_tokens: int, *, learns: Learns = Learns.GATES, recomputes: bool = False, taught: bool = False
    ) -> int:
        """Return the bytes of a forward and a backward pass.

        Args:
            num_tokens: tokens of the pass.
            learns: what is trained besides gates.
            recomputes: whether activations are recomputed, one layer at a time.
            taught: whether the loss compares with a teacher's predictions, which doubles the logits; the teacher's
                last hidden states are kept too.
        """
        kept = self.kept(num_tokens, learns=learns, recomputes=recomputes)
        logits = logit_bytes(self.size.vocabulary, num_tokens, item=self.item, learns=True)
        if taught:
            kept, logits = kept + num_tokens * self.item * self.size.hidden_size, 2 * logits
        if not recomputes:
            return kept + max(self._backward(num_tokens), logits)
        layer = num_tokens * (self._layer(learns) + self._predictor)  # recomputed after the logits are freed
        return kept + max(self._backward(num_tokens, frees=True), logits - layer)

    def transferring(self, num_tokens: int, learns: Learns) -> int:
        """Return the bytes of a teacher's pass, which records attention inputs and outputs, and of learning a layer."""
        recorded = 2 * num_tokens * self.item * self.size.hidden_size * self.size.heads.num_layers
        layer = num_tokens * (self._layer(learns) + self._predictor) + self._backward(num_tokens)
        return recorded + max(self.forward(num_tokens), layer)

    def kept(self, num_tokens: int, *, learns: Learns = Learns.GATES, recomputes: bool = False) -> int:
        """Return the bytes that a forward pass keeps for the backward pass, without logits.

        Args:
            num_tokens: tokens of the pass.
            learns: what is trained besides gates.
            recomputes: whether activations are recomputed, one layer at a time.
        """
        size, layers = self.size, self.size.heads.num_layers
        layer, gate = num_tokens * self._layer(learns), num_tokens * self._predictor
        gated = 0 if self.gates is None else num_gated(size, self.gates)
        kept = self._hidden(num_tokens) + layer + gate if recomputes else layers * layer + gated * gate
        return kept + 2 * num_tokens * FLOAT32 * size.hidden_size  # input of the last norm

    def going(self, num_tokens: int, *, learns: Learns = Learns.GATES, recomputes: bool = False) -> int:
        """Return the bytes of ``kept`` that are freed when the backward pass reaches the first layer."""
        layers = self.size.heads.num_layers
        layer_bytes = self._hidden(num_tokens) // layers if recomputes else num_tokens * self._layer(learns)
        return (layers - 1) * layer_bytes

    @property
    def _attention(self) -> tuple[int, int]:
        """Return (q, kv)."""
        return self.size.heads.attention_width, self.size.heads.num_kv_heads * self.size.heads.head_dim

    @property
    def _attention_item(self) -> int:
        """Return the bytes of an activation in attention."""
        return FLOAT32 if self.on_cpu and self.gates is not None else self.item

    @property
    def _predictor(self) -> int:
        """Return the bytes that a predictor keeps per token."""
        channels = self.size.hidden_size
        return 0 if self.gates is None else FLOAT32 * (channels + 2 * self.gates.width(channels))

    def _layer(self, learns: Learns) -> int:
        """Return the bytes that a layer keeps per token."""
        channels, ffn = self.size.hidden_size, self.size.intermediate_size
        q, kv = self._attention
        activations = self.item * (3 * ffn + q * self.mixes) + self._attention_item * 2 * (q + kv)
        norms = 2 * channels
        if learns is not Learns.GATES:
            activations += self.item * ((2 if self.item == FLOAT32 else 5) * channels + ffn + q)
        if learns is Learns.ALL:
            norms *= 2
        return activations + FLOAT32 * norms

    def _backward(self, num_tokens: int, *, frees: bool = False) -> int:
        """Return the bytes of one layer's backward pass; ``frees``: most of what is held is freed meanwhile."""
        q, kv = self._attention
        ffn = self.size.intermediate_size
        activations = FLOAT32 * 2 * ffn if frees else max(self.item * 4 * ffn, self._attention_item * (8 * q + 4 * kv))
        return num_tokens * (self.item * 2 * self.size.hidden_size + activations)

    def _hidden(self, num_tokens: int) -> int:
        """Return the bytes of the inputs of all layers."""
        item = FLOAT32 if self.autocast else self.item
        return num_tokens * item * self.size.hidden_size * self.size.heads.num_layers


@dataclass(frozen=True)
class Training:
    """Training configuration to estimate: float32 weights, AdamW, optionally matrix products in bfloat16.

    Attributes:
        steps: number of steps.
        batch_size: blocks per step, over all devices.
        micro_batch_size: blocks per pass on one device; None: its whole share.
        sharded: whether weights, gradients and moments are sharded across devices (FSDP2) or replicated (DDP).
        offloads: whether shards stay in CPU memory until they are needed.
        bfloat16: whether matrix products are in bfloat16.
        recomputes: whether activations are recomputed (activation checkpointing).
        learns: what is trained besides gates.
        adapters: number of parameters added to the model, of adapters and learned sinks.
        moment_bytes: bytes of the optimizer's moments per parameter.
        frozen_item: bytes of a frozen weight.
        distills: whether a teacher's pass precedes every forward pass.
        transfers: whether the first steps train attention layers on the teacher's outputs.
    """

    steps: int
    batch_size: int
    micro_batch_size: int | None = None
    sharded: bool = False
    offloads: bool = False
    bfloat16: bool = True
    recomputes: bool = False
    learns: Learns = Learns.ALL
    adapters: int = 0
    moment_bytes: float = MOMENTS
    frozen_item: int = FLOAT32
    distills: bool = False
    transfers: bool = False

    @property
    def weight_item(self) -> int:
        """Return the bytes of one of the model's weights."""
        return FLOAT32 if self.learns is Learns.ALL else self.frozen_item

    def passes(self, size: ModelSize, gates: GateConfig | None = None, *, on_cpu: bool = False) -> PassMemory:
        """Return the memory of its passes on one device."""
        item = BFLOAT16 if self.bfloat16 else FLOAT32
        return PassMemory(size, item, gates, autocast=item < self.weight_item, on_cpu=on_cpu)

    def passing(self, passes: PassMemory, num_tokens: int) -> int:
        """Return the bytes of the activations and logits of ``passes`` over ``num_tokens``."""
        needed = passes.learning(num_tokens, learns=self.learns, recomputes=self.recomputes, taught=self.distills)
        return max(needed, passes.transferring(num_tokens, self.learns)) if self.transfers else needed

    def teacher_bytes(self, size: ModelSize) -> int:
        """Return the bytes of a copy of the dense model; frozen weights are their own teacher."""
        if not self.distills or self.learns is not Learns.ALL:
            return 0
        item = BFLOAT16 if self.bfloat16 else FLOAT32
        return item * size.without_embeddings + FLOAT32 * (size.num_parameters - size.without_embeddings)


def fitting_pass(memory: PassMemory, block_size: int, max_blocks: int, room: float) -> tuple[int, bool]:
    """Return (blocks per pass, whether to recompute layers) to train gates on a frozen model in ``room`` bytes.

    Layers are recomputed only if the activations of a single block do not fit. At least one block is returned, even if
    it does not fit.
    """
    num_blocks = largest_fit(max_blocks, room, lambda blocks: memory.learning(blocks * block_size))
    if num_blocks:
        return num_blocks, False
    num_blocks = largest_fit(max_blocks, room, lambda blocks: memory.learning(blocks * block_size, recomputes=True))
    return max(1, num_blocks), True


def largest_fit(max_blocks: int, room: float, num_bytes: Callable[[int], float]) -> int:
    """Return the largest n <= ``max_blocks`` with ``num_bytes(n)``, which increases with n, at most ``room``; or 0."""
    return bisect.bisect_right(range(1, max_blocks + 1), room, key=num_bytes)
