"""Cost of the pipeline stages on a model, from its config: memory, tokens, FLOPs and time; needs no torch.

Memory and FLOPs are those of ``cost.formulas``, with logits and predictors, and with all gates open. A backward pass
counts as two forward passes if all weights are trained, and as one through a frozen model, with or without adapters;
recomputing layers adds one. Time is FLOPs over the throughput of the device or, for a decoded token, the lower bound by
memory bandwidth. It is None if the device is unknown.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.base.errors import UserError
from spkv_nas.cost import formulas
from spkv_nas.cost.formulas import BFLOAT16, FLOAT32, MOMENTS, ROOM, Learns, PassMemory

_SHARDS = tuple(2**exponent for exponent in range(1, 11))  # numbers of devices to recommend
_GATHERED = 2  # layers whose weights FSDP2 gathers: the current one and the next
_FIXED = "its fixed memory alone does not fit: use a device with more memory"


class Hardware(NamedTuple):
    """Data sheet of a GPU: name, memory bandwidth in bytes/s, dense bfloat16 FLOP/s, and bytes of memory."""

    name: str
    bandwidth: float
    peak: float
    memory: float


# NVIDIA's sheets of SXM modules; Hopper's peak is half of the 1,979 TFLOP/s "with sparsity"
HARDWARE = {
    "h200": Hardware("H200", 4.8e12, 989e12, 141e9),
    "h100": Hardware("H100", 3.35e12, 989e12, 80e9),
    "a100": Hardware("A100 80GB", 2.039e12, 312e12, 80e9),
}


def find_hardware(name: str) -> Hardware:
    """Return a GPU by name. Raises ``UserError``, which lists all, if there is none."""
    if name.lower() not in HARDWARE:
        raise UserError(f"unknown hardware '{name}'; expected one of {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]


@dataclass(frozen=True)
class Training:
    """Training configuration to estimate: float32 weights, AdamW, optionally matrix products in bfloat16."""

    steps: int
    batch_size: int  # blocks per step, over all devices
    micro_batch_size: int | None = None  # blocks per pass on one device; None: its whole share
    # whether weights, gradients and moments are sharded across devices (FSDP2) or replicated (DDP)
    sharded: bool = False
    offloads: bool = False  # whether shards stay in CPU memory until they are needed
    bfloat16: bool = True  # whether matrix products are in bfloat16
    recomputes: bool = False  # whether activations are recomputed (activation checkpointing)
    learns: Learns = Learns.ALL  # what is trained besides gates
    adapters: int = 0  # number of parameters added to the model, of adapters and learned sinks
    moment_bytes: float = MOMENTS  # bytes of the optimizer's moments per parameter
    frozen_item: int = FLOAT32  # bytes of a frozen weight
    distills: bool = False  # whether a teacher's pass precedes every forward pass

    @property
    def weight_item(self) -> int:
        """Return the bytes of one of the model's weights."""
        return FLOAT32 if self.learns is Learns.ALL else self.frozen_item

    def passes(self, size: ModelSize, gates: GateConfig | None = None, **site: Any) -> PassMemory:
        """Return the memory of its passes on one device; ``site`` has those fields of ``PassMemory`` that it sets."""
        item = BFLOAT16 if self.bfloat16 else FLOAT32
        return PassMemory(size, item, gates, autocast=item < self.weight_item, **site)


@dataclass(frozen=True)
class Site:
    """Hardware on which stages run."""

    name: str  # such as "H100"
    memory: float  # bytes of a device
    speed: float | None = None  # FLOP/s that passes reach on one device; None: unknown
    bandwidth: float | None = None  # memory bandwidth in bytes/s; None: unknown
    devices: int = 1  # devices that training is sharded across; everything else runs on one
    is_cpu: bool = False  # whether the memory is the machine's
    # Bytes of a chunk's logits with gradients (``base.memory.chunk_bytes``)
    chunk: int | None = None

    def holds(self, memory: "Bytes") -> bool:
        """Return whether the memory fits on a device."""
        return memory.total <= ROOM * self.memory


@dataclass(frozen=True)
class Bytes:
    """Peak memory of a stage on one device, in bytes, by content."""

    weights: float  # weights of model and predictors
    learning: float = 0.0  # gradients, Adam's moments, and copies of weights for a pass
    passing: float = 0.0  # activations and logits
    cache: float = 0.0  # keys and values

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return self.weights + self.learning + self.passing + self.cache


@dataclass(frozen=True)
class StageCost:
    """Cost of a stage."""

    name: str
    memory: Bytes  # peak memory on one device
    tokens: int  # tokens of all forward passes, counted once per pass
    flops: float  # FLOPs of all devices
    seconds: float | None  # time; None if the device is unknown
    devices: int = 1  # devices that it is sharded across
    batching: str = ""  # micro-batch size, for messages
    remedy: str = ""  # what to change if it does not fit; "" if it fits

    @property
    def fits(self) -> bool:
        """Return whether the memory suffices."""
        return not self.remedy


@dataclass(frozen=True)
class Stages:
    """Costs of all stages of one model on one site."""

    size: ModelSize
    gates: GateConfig  # its gates, present or to be attached
    site: Site
    block_size: int  # tokens per block
    batch_size: int  # blocks per pass in measurements, if they fit
    # Bytes of a weight and of an activation in measurements; training has its own
    item: int = BFLOAT16

    @property
    def num_predictor_parameters(self) -> int:
        """Return the number of parameters of all predictors."""
        return formulas.num_predictor_parameters(self.size, self.gates)

    def learn_gates(self, name: str, steps: int, step_tokens: int, *, mixes: int = 0) -> StageCost:
        """Return the cost of training gates, or shares of ``mixes`` attentions, on a frozen model."""
        of_keys = not mixes
        # Memory: as many blocks per pass as fit
        learning = (FLOAT32 + MOMENTS) * self.num_predictor_parameters if of_keys else 0
        weights = self._weights(gated=of_keys)
        gates = self.gates if of_keys else None
        passes = PassMemory(
            size=self.size,
            item=self.item,
            gates=gates,
            attentions=mixes or 1,
            on_cpu=self.site.is_cpu,
            chunk=self.site.chunk,
        )
        step_blocks = max(1, step_tokens // self.block_size)
        room = formulas.FROZEN_ROOM * (self.site.memory - weights)
        blocks, recomputes = formulas.fitting_pass(passes, self.block_size, step_blocks, room)
        passing = passes.learning(blocks * self.block_size, recomputes=recomputes)
        memory = Bytes(weights, learning, passing)
        # FLOPs; mixtures also take a pass of the unchanged model, whose predictions they preserve
        tokens = steps * step_blocks * self.block_size
        reference = 0.0 if of_keys else self._forward_flops(scored=True, gated=False)
        learned = self._learning_flops(Learns.GATES, gated=of_keys, recomputes=recomputes)
        flops = tokens * (reference + learned)
        return self._work(name, memory, tokens, flops, batching=self._batching(blocks, recomputes))

    def measure(
        self,
        name: str,
        tokens: int,
        times: float = 1.0,
        *,
        gated: bool = False,
        scored: bool = True,
        shares: float = 0.0,
    ) -> StageCost:
        """Return the cost of ``times`` passes over a text without gradients, ``times`` being a whole number or not.

        The passes compute the NLL if ``scored``, and cache the hidden states of a share of the layers for later passes.
        """
        # Find the largest micro-batch that fits
        passes = PassMemory(self.size, self.item, self.gates if gated else None)
        bytes_of = partial(passes.shared, share=shares) if scored else passes.forward
        weights = self._weights(gated=gated)
        room = ROOM * self.site.memory - weights
        fitting = formulas.largest_fit(
            self.batch_size, room, lambda number: bytes_of(number * self.block_size)
        )
        blocks = min(max(1, fitting), max(1, tokens // self.block_size))
        num_tokens = round(tokens * times)
        return self._work(
            name,
            Bytes(weights, passing=bytes_of(blocks * self.block_size)),
            num_tokens,
            num_tokens * self._forward_flops(scored=scored, gated=gated),
            batching=self._batching(blocks),
        )

    def train(self, name: str, training: Training, *, gated: bool) -> StageCost:
        """Return the cost of training a branch, with gates or as a hybrid."""
        # Count tokens and FLOPs, those of a teacher included
        tokens = training.steps * training.batch_size * self.block_size
        learns = training.learns
        recomputes = training.recomputes
        adapters = training.adapters
        teacher = self._forward_flops(scored=True, gated=False) if training.distills else 0.0
        learned = self._learning_flops(
            learns, gated=gated, recomputes=recomputes, adapters=adapters
        )
        flops = tokens * (teacher + learned)
        devices = self.site.devices
        micro = self._micro(training)
        memory = self.training_bytes(training, devices, micro, gated=gated)
        work = self._work(name, memory, tokens, flops, devices, self._batching(micro, recomputes))
        return work if work.fits else replace(work, remedy=self._training_remedy(training, gated))

    def generate(self, name: str, context: int, *, density: float, window: int) -> StageCost:
        """Return the cost of one decoded token after a prompt of ``context`` tokens that is processed in one pass."""
        cache = formulas.kv_cache_bytes(
            self.size.shape, context, density=density, window=window, element_size=self.item
        )
        weights = self._weights(gated=False)
        passing = PassMemory(self.size, self.item).forward(context)
        work = self._work(
            name, Bytes(weights, passing=passing, cache=cache), 1, 2.0 * self.size.num_multiplied
        )
        read = self.item * self.size.num_multiplied + cache
        bandwidth = self.site.bandwidth
        seconds = None if bandwidth is None else read / bandwidth
        remedy = ""
        if not work.fits:
            remedy = "a shorter --context" if weights < ROOM * self.site.memory else _FIXED
        return replace(work, seconds=seconds, remedy=remedy)

    def _work(
        self,
        name: str,
        memory: Bytes,
        tokens: int,
        flops: float,
        devices: int = 1,
        batching: str = "",
    ) -> StageCost:
        seconds = None if self.site.speed is None else flops / (self.site.speed * devices)
        remedy = "" if self.site.holds(memory) else self._remedy(memory)
        return StageCost(name, memory, tokens, flops, seconds, devices, batching, remedy)

    def _remedy(self, memory: Bytes) -> str:
        """Return a change that makes measuring or training gates on one device fit."""
        room = ROOM * self.site.memory
        if memory.weights + memory.learning <= room:
            return "a shorter --block-size, or a device with more memory"
        if self.item > BFLOAT16 and memory.weights / 2 + memory.learning < room:
            return "--dtype bfloat16"
        return _FIXED if self.site.is_cpu else f"{_FIXED}, or several devices with --device auto"

    def _training_remedy(self, training: Training, gated: bool) -> str:
        """Return the smallest change of a recipe with which training fits."""
        again = "gradient_checkpointing: true"
        smallest = "gradient_checkpointing: true, micro_batch_size: 1"
        recomputing = replace(training, recomputes=True)
        devices = self.site.devices
        changes = [
            (again, recomputing, devices, self._micro(training)),
            (smallest, recomputing, devices, 1),
        ]
        for number in _SHARDS:
            if number >= devices:
                sharded = replace(recomputing, sharded=True)
                changes.append(
                    (f"sharding: fsdp on {number} devices, {smallest}", sharded, number, 1)
                )
        for change, changed, number, blocks in changes:
            if self.site.holds(self.training_bytes(changed, number, blocks, gated=gated)):
                return change
        return "a smaller data.block_size, or devices with more memory"

    def training_bytes(
        self, training: Training, devices: int, blocks: int, *, gated: bool
    ) -> Bytes:
        """Return the memory on one of ``devices`` with micro-batches of ``blocks``."""
        size = self.size
        learns = training.learns
        learns_all = learns is Learns.ALL
        recomputes = training.recomputes
        is_sharded = training.sharded and devices > 1
        passes = training.passes(
            size, self.gates if gated else None, on_cpu=self.site.is_cpu, chunk=self.site.chunk
        )
        # Count trained parameters
        added = training.adapters + (self.num_predictor_parameters if gated else 0)
        num_learning = added + (size.num_parameters if learns_all else 0)
        # Activations, weights, gradients and moments
        tokens = blocks * self.block_size
        passing = passes.learning(
            tokens, learns=learns, recomputes=recomputes, taught=training.distills
        )
        layer = size.without_embeddings / size.num_decoder_layers
        outside = size.num_parameters - size.without_embeddings
        weights = training.weight_item * size.num_parameters + FLOAT32 * added
        # The teacher is a copy; frozen weights are their own teacher
        if training.distills and learns_all:
            outside_item = passes.item if is_sharded else FLOAT32
            weights += passes.item * size.without_embeddings + outside_item * outside
        gradients = FLOAT32 * num_learning
        moments = training.moment_bytes * num_learning
        # FSDP2: a shard of everything, plus gathered layers and one layer's gradient
        if is_sharded:
            gathered = passes.item * (outside + _GATHERED * layer) + FLOAT32 * layer
            share = 0.0 if training.offloads else 1.0 / devices
            return Bytes(weights * share, (gradients + moments) * share + gathered, passing)
        # DDP or one device: everything
        if devices > 1:
            gradients *= 2  # DDP's communication buckets
        elif training.batch_size <= blocks:
            # Gradients of layers appear while activations are freed
            layer_gradients = FLOAT32 * (num_learning - (outside if learns_all else 0))
            freed = passes.going(tokens, learns=learns, recomputes=recomputes)
            gradients -= min(layer_gradients, freed)
        copies = self._autocast_bytes(training, passes)
        return Bytes(weights, gradients + moments + copies, passing)

    def _autocast_bytes(self, training: Training, passes: PassMemory) -> float:
        """Return the bytes of bfloat16 copies of weights; those of frozen weights are kept only while needed."""
        if not passes.autocast:
            return 0.0
        size = self.size
        if training.learns is Learns.ALL or not training.recomputes:
            return passes.item * size.num_parameters
        layer = size.without_embeddings / size.num_decoder_layers
        return passes.item * (size.num_parameters - size.without_embeddings + layer)

    def _micro(self, training: Training) -> int:
        """Return the blocks of a pass on one device."""
        blocks_per_device = max(1, training.batch_size // self.site.devices)
        return min(blocks_per_device, training.micro_batch_size or blocks_per_device)

    def _weights(self, *, gated: bool) -> int:
        """Return the bytes of the weights, and of predictors."""
        predictors = FLOAT32 * self.num_predictor_parameters if gated else 0
        return self.item * self.size.num_parameters + predictors

    def _forward_flops(self, *, scored: bool, gated: bool) -> float:
        """Return the FLOPs per token of a forward pass, with logits if ``scored`` and predictors if ``gated``."""
        size = self.size
        density = size.full_attention_share
        window = size.sliding_window
        body = formulas.flops_per_token(size.shape, self.block_size, density=density, window=window)
        logits = 2.0 * size.vocabulary * size.hidden_size if scored else 0.0
        predictors = 2.0 * self.num_predictor_parameters if gated else 0.0
        return body + logits + predictors

    def _learning_flops(
        self, learns: Learns, *, gated: bool, recomputes: bool, adapters: int = 0
    ) -> float:
        """Return the FLOPs per token of a forward and a backward pass."""
        forward = self._forward_flops(scored=True, gated=False)
        num_added = adapters + (self.num_predictor_parameters if gated else 0)
        added = 2.0 * num_added
        repeated = forward + added if recomputes else 0.0
        return (3 if learns is Learns.ALL else 2) * forward + 3 * added + repeated

    def _batching(self, blocks: int, recomputes: bool = False) -> str:
        """Return the size of a pass in words."""
        words = f"{blocks} x {self.block_size:,} tokens per pass"
        return f"{words}, activation checkpointing" if recomputes else words
