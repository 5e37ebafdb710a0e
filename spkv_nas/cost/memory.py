"""What a decoder takes in memory at the peak of a pass, by formula; needs no torch.

Counted per token and layer are the values that PyTorch's autograd and a Llama's own code hold at once, with d and f the
channels of a token and of the FFN, q = Hq D, kv = Hkv D, and h the width of the predictor's hidden layer::

    forward     4 d + max(3 f, 4 q + 4 kv)       of one layer, the others' are gone
    kept        2 d + 3 f + 2 q + 2 kv            for the backward pass, where gates alone learn
                + d + 2 h                         of a predictor
                + 2 d + f + q                     what enters linear layers, where these or adapters learn
                or 5 d + f + q                    where each casts it for itself
                + 2 d                             where all weights learn
    backward    2 d + max(4 f, 8 q + 4 kv)        of one layer, on top of what all have kept
                or 2 d + 2 f (bfloat16: 4 f)      where that layer alone is kept, and frees while it takes

Norms (2 d of what is kept, 4 d of it where all learn) and predictors compute in float32, all else in the dtype of the
pass. In bfloat16 each linear layer casts what enters it; with weights in float32 (autocast) what goes from layer to
layer stays so. Layers that are computed again (activation checkpointing) keep their input, d, and one at a time the
rest, once the logits are gone. The logits of all tokens are never there at once, only those of a chunk
(``base.memory.CHUNK_BYTES``). Kernels take little: attention's memory is linear in the tokens. What adapters keep by
their rank is left out. What an allocator keeps for itself comes on top. Of other families autograd keeps within a tenth
as much; of Gemma 3, with twice the norms, a quarter more where all weights learn. reports/LOG.md has measured peaks
beside these.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from spkv_nas.artifacts.gate_config import GATED, GateConfig
from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.base.memory import chunk_tokens

ROOM = 0.9  # share of the memory that is there which passes may take; the rest is the allocator's and the driver's
FLOAT32 = 4  # bytes
MOMENTS = 8  # bytes of Adam's two per parameter


class Learns(Enum):
    """What a backward pass has gradients of."""

    GATES = "predictors alone"
    ADAPTERS = "adapters of linear layers, and predictors"
    ALL = "all weights"


def logit_bytes(vocabulary: int, num_tokens: int, *, item: int, learns: bool = False) -> int:
    """Bytes at the peak of the logits of ``num_tokens``, and of what a loss makes of them.

    Args:
        item: bytes of a logit as the model makes it.
        learns: with the gradient.
    """
    copies = (8 if learns else 4) + (4 if item < FLOAT32 else 0)  # log-softmax, its gradient, the logits in float32
    return min(num_tokens, chunk_tokens(vocabulary)) * vocabulary * (item + copies)


def num_predictor_parameters(size: ModelSize, gates: GateConfig) -> int:
    """Parameters of all predictors that gates put on a model."""
    channels, heads, hidden = size.hidden_size, size.heads.num_kv_heads, gates.width(size.hidden_size)
    one = (channels if gates.predictor == "linear" else hidden) * heads + heads
    if gates.predictor != "linear":
        one += channels * hidden + hidden
    if gates.predictor == "bidirectional":
        one += hidden * gates.kernel_size + hidden
    return one * num_gated(size, gates)


def num_gated(size: ModelSize, gates: GateConfig) -> int:
    """Layers that have a predictor."""
    return size.num_full if gates.heads is None else sum(GATED in row for row in gates.heads)


@dataclass(frozen=True)
class PassMemory:
    """Bytes that passes of a decoder take beside its weights.

    Attributes:
        size: of the decoder.
        item: bytes of an activation.
        gates: that it has, if any.
        mixes: whether heads mix global and local attention, and keep the results of both.
        autocast: whether the model's own weights are float32, and cast for every product.
        on_cpu: whether gated attention computes, and keeps what it does, in float32.
    """

    size: ModelSize
    item: int = FLOAT32
    gates: GateConfig | None = None
    mixes: bool = False
    autocast: bool = False
    on_cpu: bool = False

    def forward(self, num_tokens: int) -> int:
        """Of a pass without gradients, up to the last hidden states."""
        q, kv = self._attention
        size = self.size
        return num_tokens * self.item * (4 * size.hidden_size + max(3 * size.intermediate_size, 4 * (q + kv)))

    def scored(self, num_tokens: int) -> int:
        """Of a pass without gradients and the NLL of its tokens."""
        hidden = 2 * num_tokens * self.item * self.size.hidden_size
        return max(self.forward(num_tokens), hidden + logit_bytes(self.size.vocabulary, num_tokens, item=self.item))

    def shared(self, num_tokens: int, share: float = 1.0) -> int:
        """Of scored passes that go on from earlier ones' hidden states, kept of a ``share`` of the layers at once."""
        return self.scored(num_tokens) + round(self._hidden(num_tokens) * share)

    def learning(self, num_tokens: int, *, learns: Learns = Learns.GATES, recomputes: bool = False) -> int:
        """Of a forward and a backward pass; the arguments are those of ``kept``."""
        kept = self.kept(num_tokens, learns=learns, recomputes=recomputes)
        logits = logit_bytes(self.size.vocabulary, num_tokens, item=self.item, learns=True)
        if not recomputes:
            return kept + max(self._backward(num_tokens), logits)
        layer = num_tokens * (self._layer(learns) + self._predictor)  # computed again once the logits are gone
        return kept + max(self._backward(num_tokens, frees=True), logits - layer)

    def kept(self, num_tokens: int, *, learns: Learns = Learns.GATES, recomputes: bool = False) -> int:
        """Of what a forward pass keeps for the backward pass, logits aside.

        Args:
            learns: what does, beside gates.
            recomputes: the activations of one layer after the other.
        """
        size, layers = self.size, self.size.heads.num_layers
        layer, gate = num_tokens * self._layer(learns), num_tokens * self._predictor
        gated = 0 if self.gates is None else num_gated(size, self.gates)
        kept = self._hidden(num_tokens) + layer + gate if recomputes else layers * layer + gated * gate
        return kept + 2 * num_tokens * FLOAT32 * size.hidden_size  # the last norm's

    def going(self, num_tokens: int, *, learns: Learns = Learns.GATES, recomputes: bool = False) -> int:
        """Of what is ``kept``, what is gone when the backward pass comes to the first layer."""
        layers = self.size.heads.num_layers
        each = self._hidden(num_tokens) // layers if recomputes else num_tokens * self._layer(learns)
        return (layers - 1) * each

    @property
    def _attention(self) -> tuple[int, int]:
        """(q, kv)."""
        return self.size.heads.attention_width, self.size.heads.num_kv_heads * self.size.heads.head_dim

    @property
    def _attention_item(self) -> int:
        return FLOAT32 if self.on_cpu and self.gates is not None else self.item

    @property
    def _predictor(self) -> int:
        """Bytes that a predictor keeps of a token."""
        channels = self.size.hidden_size
        return 0 if self.gates is None else FLOAT32 * (channels + 2 * self.gates.width(channels))

    def _layer(self, learns: Learns) -> int:
        """Bytes that a layer keeps of a token."""
        channels, ffn = self.size.hidden_size, self.size.intermediate_size
        q, kv = self._attention
        own = self.item * (3 * ffn + q * self.mixes) + self._attention_item * 2 * (q + kv)
        norms = 2 * channels
        if learns is not Learns.GATES:
            own += self.item * ((2 if self.item == FLOAT32 else 5) * channels + ffn + q)
        if learns is Learns.ALL:
            norms *= 2
        return own + FLOAT32 * norms

    def _backward(self, num_tokens: int, *, frees: bool = False) -> int:
        """Of one layer; ``frees`` where what it frees meanwhile is most of what is there."""
        q, kv = self._attention
        ffn = self.size.intermediate_size
        own = FLOAT32 * 2 * ffn if frees else max(self.item * 4 * ffn, self._attention_item * (8 * q + 4 * kv))
        return num_tokens * (self.item * 2 * self.size.hidden_size + own)

    def _hidden(self, num_tokens: int) -> int:
        """What enters every layer."""
        item = FLOAT32 if self.autocast else self.item
        return num_tokens * item * self.size.hidden_size * self.size.heads.num_layers


def fitting_pass(memory: PassMemory, block_size: int, wanted: int, room: float) -> tuple[int, bool]:
    """How gates on a frozen model learn in ``room`` bytes: (blocks of a pass, whether layers are computed again).

    They are only where not even one block's activations fit. One block there is, whether it fits or not.
    """
    whole = most(wanted, room, lambda blocks: memory.learning(blocks * block_size))
    if whole:
        return whole, False
    return max(1, most(wanted, room, lambda blocks: memory.learning(blocks * block_size, recomputes=True))), True


def most(wanted: int, room: float, num_bytes: Callable[[int], float]) -> int:
    """The largest number, up to ``wanted``, whose ``num_bytes``, which rise with it, are at most ``room``; or 0."""
    return bisect.bisect_right(range(1, wanted + 1), room, key=num_bytes)
