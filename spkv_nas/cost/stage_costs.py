"""What the stages of the path take on a model, from its config alone: memory, tokens, FLOPs and time; needs no torch.

Memory is that of ``cost.memory`` on one device. FLOPs are ``cost.formulas``' of a forward pass, with logits and
predictors added, and gates counted as open. A backward pass counts as two forward passes where all weights learn, as
one through a frozen model, with or without adapters; layers that are computed again add one. Time is FLOPs over what a
device reaches, or, of a token that is decoded, the least that its memory allows. Where nothing is known of the device
there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.base.units import format_bytes
from spkv_nas.cost.adapters import num_adapter_parameters
from spkv_nas.cost.formulas import flops_per_token, kv_cache_bytes
from spkv_nas.cost.memory import (
    FLOAT32,
    MOMENTS,
    ROOM,
    Learns,
    PassMemory,
    fitting_pass,
    most,
    num_predictor_parameters,
)

BFLOAT16 = 2  # bytes
_SHORTEST_BLOCK = 128  # tokens, that is advised
_MOST_DEVICES = 1024
_RANK = 16  # of the adapters that are advised
_AGAIN = "gradient_checkpointing: true"
_GATHERED = 2  # layers whose weights FSDP2 holds whole: the one that computes, and the next
_FIXED = "what no block changes takes more already: a device with more memory"
_PARTED = f"{_FIXED}, or several with --device auto"


@dataclass(frozen=True)
class Site:
    """Where stages run.

    Attributes:
        name: for people, such as "H100".
        memory: bytes of a device.
        speed: FLOP/s that passes reach on one; None: unknown.
        bandwidth: bytes/s of its memory; None: unknown.
        devices: over which training is parted; everything else runs on one.
        is_cpu: whether the memory is the machine's.
    """

    name: str
    memory: float
    speed: float | None = None
    bandwidth: float | None = None
    devices: int = 1
    is_cpu: bool = False

    def holds(self, memory: Bytes) -> bool:
        """Whether a device has room for it."""
        return memory.total <= ROOM * self.memory


@dataclass(frozen=True)
class Bytes:
    """Bytes at the peak of a stage, on one device, by what they hold.

    Attributes:
        weights: of model and predictors.
        learning: gradients, Adam's moments, copies of weights for a pass.
        passing: activations and logits.
        cache: keys and values.
    """

    weights: float
    learning: float = 0.0
    passing: float = 0.0
    cache: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.learning + self.passing + self.cache


@dataclass(frozen=True)
class StageCost:
    """What a stage takes.

    Attributes:
        name: of the stage.
        memory: on one device, at the peak.
        tokens: that pass forward, those of repeated passes each time.
        flops: of all devices.
        seconds: None where nothing is known of the device.
        devices: over which it is parted.
        how: what passes at once, for people.
        remedy: what to change where it does not fit; "" where it does, None where nothing is known of the memory.
    """

    name: str
    memory: Bytes
    tokens: int
    flops: float
    seconds: float | None
    devices: int = 1
    how: str = ""
    remedy: str | None = ""

    @property
    def fits(self) -> bool | None:
        """Whether there is memory for it; None: unknown."""
        return None if self.remedy is None else not self.remedy


@dataclass(frozen=True)
class Training:
    """How weights are trained: what learns in float32, by an AdamW, matrix products in bfloat16 if so.

    Attributes:
        steps, batch_size: of all devices, in blocks.
        micro_batch_size: blocks of a pass on one device; None: its whole share.
        sharded: weights, gradients and moments are parted over the devices (FSDP2), and not whole on each (DDP).
        offloads: shards are in the CPU's memory until they are needed.
        recomputes: activations of layers are computed again (activation checkpointing).
        learns: what does, beside gates.
        adapters: parameters of those that learn.
        moment_bytes: of the optimizer's moments of a parameter.
        frozen_item: bytes of a weight that does not learn.
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

    @property
    def weight_item(self) -> int:
        """Bytes of one of the model's weights."""
        return FLOAT32 if self.learns is Learns.ALL else self.frozen_item

    def passes(self, size: ModelSize, gates: GateConfig | None = None, *, on_cpu: bool = False) -> PassMemory:
        """What its passes take on one device."""
        item = BFLOAT16 if self.bfloat16 else FLOAT32
        return PassMemory(size, item, gates, autocast=item < self.weight_item, on_cpu=on_cpu)


@dataclass(frozen=True)
class Stages:
    """The stages of one model on one site.

    Attributes:
        item: bytes of a weight and of an activation where the model is measured; training has its own.
        gates: that it has or gets.
        block_size: tokens.
        batch_size: blocks of a pass where the model is measured, if they fit.
    """

    size: ModelSize
    gates: GateConfig
    site: Site
    block_size: int
    batch_size: int
    item: int = BFLOAT16

    @property
    def num_predictor_parameters(self) -> int:
        """Parameters of all predictors."""
        return num_predictor_parameters(self.size, self.gates)

    def learn_gates(self, name: str, steps: int, step_tokens: int, room: float, *, of_keys: bool = True) -> StageCost:
        """Gates on a frozen model, in passes that take ``room`` of what the weights leave free.

        Args:
            of_keys: predictors of keys learn; otherwise one number per head.
        """
        learning = (FLOAT32 + MOMENTS) * self.num_predictor_parameters if of_keys else 0
        weights = self._weights(gated=of_keys)
        gates, on_cpu = self.gates if of_keys else None, self.site.is_cpu
        passes = PassMemory(self.size, self.item, gates, mixes=not of_keys, on_cpu=on_cpu)
        wanted = max(1, step_tokens // self.block_size)
        blocks, again = fitting_pass(passes, self.block_size, wanted, room * (self.site.memory - weights))
        memory = Bytes(weights, learning, passes.learning(blocks * self.block_size, recomputes=again))
        tokens = steps * wanted * self.block_size
        flops = tokens * self._learning_flops(Learns.GATES, gated=of_keys, recomputes=again)

        def better(length: int) -> StageCost:
            return replace(self, block_size=length).learn_gates(name, steps, step_tokens, room, of_keys=of_keys)

        return self._work(name, memory, tokens, flops, how=self._how(blocks, again), better=better)

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
        """Passes over so many tokens without gradients.

        Args:
            times: passes, parts of one counted as such.
            gated: whether gates are on it.
            scored: whether the NLL is wanted, and not what gates keep alone.
            shares: of how many layers passes keep hidden states, from which others go on; a share of them.
        """
        passes = PassMemory(self.size, self.item, self.gates if gated else None)
        bytes_of = partial(passes.shared, share=shares) if scored else passes.forward
        weights = self._weights(gated=gated)
        room = ROOM * self.site.memory - weights
        blocks = max(1, most(self.batch_size, room, lambda number: bytes_of(number * self.block_size)))
        blocks = min(blocks, max(1, tokens // self.block_size))
        seen = round(tokens * times)
        return self._work(
            name, Bytes(weights, passing=bytes_of(blocks * self.block_size)), seen,
            seen * self._forward_flops(scored=scored, gated=gated), how=self._how(blocks),
            better=lambda length: replace(self, block_size=length).measure(
                name, tokens, times, gated=gated, scored=scored, shares=shares
            ),
        )  # fmt: skip

    def train(self, name: str, how: Training, *, gated: bool) -> StageCost:
        """A branch, with gates or as a hybrid."""
        tokens = how.steps * how.batch_size * self.block_size
        flops = tokens * self._learning_flops(how.learns, gated=gated, recomputes=how.recomputes, adapters=how.adapters)
        devices, micro = self.site.devices, self._micro(how)
        memory = self._training_bytes(how, devices, micro, gated)
        passes = self._how(micro, how.recomputes)
        if not how.recomputes:
            again = self._training_bytes(replace(how, recomputes=True), devices, micro, gated).total
            passes += f"; {format_bytes(round(again))} with gradient_checkpointing"
        work = self._work(name, memory, tokens, flops, devices, passes)
        return work if work.fits else replace(work, remedy=self._training_remedy(how, gated))

    def export(self, name: str) -> StageCost:
        """The largest part of the model in float32, a layer or the embedding; its weights stay in their files."""
        size = self.size
        part = max(size.without_embeddings / size.heads.num_layers, size.vocabulary * size.hidden_size)
        work = self._work(name, Bytes(FLOAT32 * part), 0, 0.0, how="on the CPU")
        return replace(work, seconds=None, remedy=work.remedy if self.site.is_cpu else None)

    def generate(self, name: str, context: int, *, density: float, window: int) -> StageCost:
        """A token after a prompt of ``context`` tokens, which passes at once; as ``formulas.kv_cache_bytes``."""
        cache = kv_cache_bytes(self.size.shape, context, density=density, window=window, element_size=self.item)
        weights = self._weights(gated=False)
        passing = PassMemory(self.size, self.item).forward(context)
        work = self._work(name, Bytes(weights, passing=passing, cache=cache), 1, 2.0 * self.size.num_multiplied)
        read = self.item * self.size.num_multiplied + cache
        seconds = None if self.site.bandwidth is None else read / self.site.bandwidth
        remedy = "" if work.fits else "a shorter --context" if weights < ROOM * self.site.memory else _FIXED
        return replace(work, seconds=seconds, remedy=remedy)

    def _work(
        self, name: str, memory: Bytes, tokens: int, flops: float, devices: int = 1, how: str = "",
        better: Callable[[int], StageCost] | None = None,
    ) -> StageCost:  # fmt: skip
        """``better`` gives the same at another block size."""
        speed = self.site.speed
        seconds = None if speed is None else flops / (speed * devices)
        remedy = "" if self.site.holds(memory) else self._remedy(memory, better)
        return StageCost(name, memory, tokens, flops, seconds, devices, how, remedy)

    def _remedy(self, memory: Bytes, better: Callable[[int], StageCost] | None) -> str:
        """What makes a stage fit that runs on one device."""
        room = ROOM * self.site.memory
        if memory.weights + memory.learning > room:
            halved = memory.weights / 2 + memory.learning
            if self.item > BFLOAT16 and halved < room:
                return "--dtype bfloat16"
            return _FIXED if better is None or self.site.is_cpu else _PARTED
        if better is not None and self.block_size > _SHORTEST_BLOCK:
            shorter = better(self.block_size // 2)
            return shorter.remedy or f"--block-size {self.block_size // 2}"
        return "a device with more memory"

    def _training_remedy(self, how: Training, gated: bool) -> str:
        """The least change of a recipe with which training fits."""
        again, micro = replace(how, recomputes=True), self._micro(how)
        ways = {"": how, f"{_AGAIN}, ": again}
        for said, way in ways.items():
            if fitting := self._fitting(way, gated):
                smaller = f"{said}micro_batch_size: {max(n for n in range(1, fitting + 1) if micro % n == 0)}"
                return _AGAIN if fitting == micro else smaller
        remedy = self._sharded_remedy(ways, gated)
        adapted = replace(again, learns=Learns.ADAPTERS, adapters=num_adapter_parameters(self.size, _RANK))
        adapts = how.learns is Learns.ALL and self._fitting(adapted, gated)
        return f"lora: {{}} and {_AGAIN}, or {remedy}" if adapts else remedy

    def _sharded_remedy(self, ways: Mapping[str, Training], gated: bool) -> str:
        """The fewest devices over which training fits in one of the ways."""
        number = max(2, self.site.devices)
        while number <= _MOST_DEVICES:
            for said, way in ways.items():
                if self.site.holds(self._training_bytes(replace(way, sharded=True), number, 1, gated)):
                    return f"sharding: fsdp on {number} devices, {said}micro_batch_size: 1"
            number *= 2
        return "a smaller data.block_size, or devices with more memory"

    def _fitting(self, how: Training, gated: bool) -> int:
        """The most blocks that pass at once on one of the site's devices; 0 where not even one does."""
        room, devices = ROOM * self.site.memory, self.site.devices
        return most(self._micro(how), room, lambda blocks: self._training_bytes(how, devices, blocks, gated).total)

    def _training_bytes(self, how: Training, devices: int, blocks: int, gated: bool) -> Bytes:
        """On one of ``devices``, ``blocks`` passing at once."""
        size, passes = self.size, how.passes(self.size, self.gates if gated else None, on_cpu=self.site.is_cpu)
        predictors = self.num_predictor_parameters if gated else 0
        learning = predictors + how.adapters + (size.num_parameters if how.learns is Learns.ALL else 0)
        tokens = blocks * self.block_size
        passing = passes.learning(tokens, learns=how.learns, recomputes=how.recomputes)
        weights = how.weight_item * size.num_parameters + FLOAT32 * (predictors + how.adapters)
        gradients, moments = FLOAT32 * learning, how.moment_bytes * learning
        layer = size.without_embeddings / size.heads.num_layers
        outside = size.num_parameters - size.without_embeddings
        if how.sharded and devices > 1:
            whole = passes.item * (outside + _GATHERED * layer) + FLOAT32 * layer  # and the gradient of one
            share = 0.0 if how.offloads else 1.0 / devices
            return Bytes(weights * share, (gradients + moments) * share + whole, passing)
        copies = 0.0
        if passes.autocast:  # its own; of weights that do not learn only as long as they are needed
            shortly = how.recomputes and how.learns is not Learns.ALL
            copies = passes.item * (outside + layer if shortly else size.num_parameters)
        if devices > 1:
            gradients *= 2  # DDP gathers them in copies
        elif how.batch_size <= blocks:  # those of layers come as activations go
            coming = FLOAT32 * (learning - (outside if how.learns is Learns.ALL else 0))
            gradients -= min(coming, passes.going(tokens, learns=how.learns, recomputes=how.recomputes))
        return Bytes(weights, gradients + moments + copies, passing)

    def _micro(self, how: Training) -> int:
        own = max(1, how.batch_size // self.site.devices)
        return min(own, how.micro_batch_size or own)

    def _weights(self, *, gated: bool) -> int:
        return self.item * self.size.num_parameters + (FLOAT32 * self.num_predictor_parameters if gated else 0)

    def _forward_flops(self, *, scored: bool, gated: bool) -> float:
        """Of a token."""
        size = self.size
        body = flops_per_token(size.shape, self.block_size, density=size.own_density, window=size.own_window)
        logits = 2.0 * size.vocabulary * size.hidden_size if scored else 0.0
        return body + logits + (2.0 * self.num_predictor_parameters if gated else 0.0)

    def _learning_flops(self, learns: Learns, *, gated: bool, recomputes: bool, adapters: int = 0) -> float:
        """Of a token, forward and backward."""
        forward = self._forward_flops(scored=True, gated=False)
        added = 2.0 * (adapters + (self.num_predictor_parameters if gated else 0))
        passes = 3 if learns is Learns.ALL else 2
        return passes * forward + 3 * added + (forward + added if recomputes else 0.0)

    def _how(self, blocks: int, again: bool = False) -> str:
        return f"{blocks} x {self.block_size:,} tokens a pass" + (", layers computed again" if again else "")
