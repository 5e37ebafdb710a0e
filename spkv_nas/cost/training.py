"""Settings of a training that determine its memory and time; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.shape import ModelSize
from spkv_nas.cost.memory import BFLOAT16, FLOAT32, MOMENTS, Learns, PassMemory


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
