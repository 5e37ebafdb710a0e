"""Distillation: a loss by which a model with local heads or gates learns from the dense model that it started from.

The loss of a token mixes its NLL with the KL divergence from the teacher's prediction at temperature t (Hinton et al.,
arXiv 1503.02531)::

    (1 - weight) NLL + weight t^2 KL(softmax(teacher / t) || softmax(student / t))
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from spkv_nas.base.distributed import sum_over_processes
from spkv_nas.model import attach, attention, loss, modes, windows
from spkv_nas.model.loss import NO_TARGET, DecoderPass, Forward, forward_inside, logits_of, replaced


@dataclass(frozen=True)
class Teacher:
    """Dense model whose predictions a student learns."""

    model: PreTrainedModel  # the student itself, or a copy of the dense model
    # Returns a context in which passes of model are the dense model's
    dense_state: Callable[[], AbstractContextManager[object]] = nullcontext
    # Returns a context in which the logits it computes from last hidden states are; cheaper to enter
    dense_head: Callable[[], AbstractContextManager[object]] = nullcontext


def shared_teacher(
    student: PreTrainedModel,
    without_adapters: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Teacher:
    """Return a teacher that shares the student's frozen weights: all heads global, gates open, adapters off.

    ``without_adapters`` returns a context in which the student's adapters are disabled.
    """

    @contextmanager
    def dense() -> Iterator[None]:
        is_hooked = bool(attention.attention_layers(student))
        with (
            windows.full_attention(student) if is_hooked else modes.evaluation_mode(student),
            without_adapters(),
        ):
            yield

    return Teacher(student, dense, without_adapters)


def copied_teacher(dense: PreTrainedModel, student: PreTrainedModel, *, bfloat16: bool) -> Teacher:
    """Make a copy of the dense model a teacher, in place, for a student whose weights all change.

    It runs under the student's autocast. What this would cast for every product is stored in bfloat16 once, and the
    rest stays float32, so that teacher and student agree to the bit before the student is changed. ``dense`` is in
    float32 and shares no tensor with ``student``, whose attention function it uses.
    """
    if attention.attention_layers(student):
        attach.hook_layers(dense)
    dense.requires_grad_(False).eval()
    # Convert linear weights, except those shared with embeddings
    if bfloat16:
        embeddings = {
            id(p) for m in dense.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
        }
        for module in dense.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
                    parameter.data = parameter.data.to(torch.bfloat16)
    return Teacher(dense)


@dataclass
class Distillation:
    """Loss of a student and its teacher, and the sums of its parts."""

    teacher: Teacher  # the dense model
    weight: float = 1.0  # weight of the divergence, in (0, 1]; the NLL has the rest
    temperature: float = 1.0  # temperature of both predictions
    # Float64 [3]: sums of NLL and divergence over tokens, and the number of tokens, since the last ``take_means``
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def begin_pass(self, student: PreTrainedModel) -> DecoderPass:
        """Begin a training pass of the student, for ``loss_in_chunks``."""
        return _DistilledPass(student, self)

    def take_means(self) -> dict[str, float]:
        """Return the means per token of NLL and divergence, in nats, since the last call. Collective."""
        nll, divergence, tokens = sum_over_processes(self.sums).tolist()
        self.sums = torch.zeros_like(self.sums)
        return {"nll": nll / tokens, "kl": divergence / tokens} if tokens else {}


class _DistilledPass(DecoderPass):
    """Decoder pass of a student, after its teacher's on the same arguments; the loss mixes NLL and divergence."""

    def __init__(self, student: PreTrainedModel, distillation: Distillation) -> None:
        """Replace the student's decoder until it is called."""
        super().__init__(student)
        self._distillation = distillation
        self._teacher_decoder = distillation.teacher.model.get_decoder()
        # The teacher must wait for the pass, in which autocast is as in training
        self._replaced = ExitStack()
        self._replaced.enter_context(replaced(self._decoder, "forward", self._decode))

    def _decode(self, *args: Any, **kwargs: Any) -> Any:
        """Record the teacher's last hidden states, and run the student's decoder."""
        self._replaced.close()
        teacher = self._distillation.teacher.model
        decode = self._teacher_decoder.forward
        with torch.no_grad(), self._distillation.teacher.dense_state():
            if teacher is self._model:  # whose pass this is
                self.taught = decode(*args, **kwargs)
            else:  # as a pass of the model, whose hooks gather the weights of a sharded one
                with replaced(teacher, "forward", decode):
                    self.taught = teacher(*args, **kwargs)
        return self._decoder.forward(*args, **kwargs)

    def total(self, targets: Tensor, forward: Forward) -> Tensor:
        """Compute the sum of losses with gradients, then free what a sharded copy of the dense model has gathered."""
        total = super().total(targets, forward)
        teacher = self._distillation.teacher.model
        if isinstance(teacher, FSDPModule) and teacher is not self._model:
            teacher.reshard()
        return total

    def _losses(
        self, logits: Tensor, targets: Tensor, taught: Tensor | None, forward: Forward
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a chunk's losses, float32 [n], and the gradient for its logits [n, V]; add the parts to the sums."""
        distillation = self._distillation
        teacher = self._distillation.teacher
        assert taught is not None  # the teacher's last hidden states [n, C], of a pass of its own
        # Compute the teacher's logits, which need no gradient
        with torch.no_grad(), teacher.dense_head():
            forward = forward_inside(teacher.model)
            output = type(self.taught)
            reference = logits_of(self._teacher_decoder, output, taught[None], forward)[0]
        # Compute the parts of the losses, add them up, and mix them
        weight = distillation.weight
        temperature = distillation.temperature
        nll, divergence, gradient = loss.token_losses(
            logits, reference, targets, weight, temperature
        )
        is_target = targets != NO_TARGET
        sums = [part.sum().double() for part in (nll, divergence, is_target)]
        distillation.sums = distillation.sums.to(logits.device) + torch.stack(sums)
        return (1.0 - weight) * nll + weight * temperature**2 * divergence, gradient
