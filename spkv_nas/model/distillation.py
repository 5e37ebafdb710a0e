"""Distillation: losses by which a model with local heads or gates learns from the dense model that it started from.

The loss of a token mixes its NLL with the KL divergence from the teacher's prediction at temperature t (Hinton et al.,
arXiv 1503.02531; Puzzletron and most other hybrids retrain by it)::

    (1 - weight) NLL + weight t^2 KL(softmax(teacher / t) || softmax(student / t))

Both logits are computed chunk by chunk (``model.loss``), never those of a whole batch. The gradient is
``(1 - weight) (p - onehot) + weight t (p_t - q_t)``, whose second term is exactly 0 where student and teacher agree:
automatic differentiation of log-softmax would leave rounding errors, which AdamW scales up to steps.

Attention transfer comes before (LoLCATs, arXiv 2410.10254, section 3.1): every attention layer is trained alone to give
what the teacher's gives on the same input. Both read the teacher's hidden states, so one pass of the teacher and one
of the student's attention layers suffices. Layers are trained on the mean squared error of their outputs, after the
output projection; nothing outside attention changes. With full attention under the student's weights as the target
instead, which needs no teacher, the target would move with the weights, and values that shrink would reduce the error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.model.attach import hook_layers
from spkv_nas.model.attention import attention_layers
from spkv_nas.model.loss import NO_TARGET, DecoderPass, forward_inside, logits_of, replaced_forward, with_gradients
from spkv_nas.model.modes import evaluation_mode
from spkv_nas.model.windows import full_attention

_Call = tuple[tuple[Any, ...], dict[str, Any], Tensor]  # arguments and output of an attention layer


@dataclass(frozen=True)
class Teacher:
    """Dense model whose predictions a student learns.

    Attributes:
        model: the student itself, or a copy of the dense model.
        dense_state: returns a context in which passes of ``model`` are the dense model's.
        dense_head: returns a context in which the logits it computes from last hidden states are; cheaper to enter.
    """

    model: PreTrainedModel
    dense_state: Callable[[], AbstractContextManager[object]] = nullcontext
    dense_head: Callable[[], AbstractContextManager[object]] = nullcontext


def shared_teacher(
    student: PreTrainedModel, without_adapters: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Teacher:
    """Return a teacher that shares the student's frozen weights: all heads global, gates open, adapters off.

    Args:
        student: model whose weights are frozen.
        without_adapters: returns a context in which its adapters are disabled.
    """

    @contextmanager
    def dense() -> Iterator[None]:
        is_hooked = bool(attention_layers(student))
        with full_attention(student) if is_hooked else evaluation_mode(student), without_adapters():
            yield

    return Teacher(student, dense, without_adapters)


def copied_teacher(dense: PreTrainedModel, student: PreTrainedModel, *, bfloat16: bool) -> Teacher:
    """Make a copy of the dense model a teacher, in place, for a student whose weights all change.

    It runs under the student's autocast. What this would cast for every product is stored in bfloat16 once, and the
    rest stays float32, so that teacher and student agree to the bit before the student is changed.

    Args:
        dense: copy of the dense model in float32, which shares no tensor with ``student``.
        student: model with its layout or gates. If it has none, the teacher uses the same attention function.
        bfloat16: whether products are computed in bfloat16.
    """
    if attention_layers(student):
        hook_layers(dense)
    dense.requires_grad_(False).eval()
    # Convert linear weights, except those shared with embeddings
    if bfloat16:
        embeddings = {id(p) for m in dense.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        for module in dense.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
                    parameter.data = parameter.data.to(torch.bfloat16)
    return Teacher(dense)


@dataclass
class Distillation:
    """Loss of a student and its teacher, and the sums of its parts.

    Attributes:
        teacher: the dense model.
        weight: weight of the divergence, in (0, 1]; the NLL has the rest.
        temperature: temperature of both predictions.
        transfers: whether passes train attention layers alone, on the teacher's outputs.
        sums: float64 [5]: sums over tokens of NLL, divergence and squared error of attention outputs, and the numbers
            of tokens of the first two and of the last; to be read and reset by the caller.
    """

    teacher: Teacher
    weight: float = 1.0
    temperature: float = 1.0
    transfers: bool = False
    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))

    def begin_pass(self, student: PreTrainedModel) -> DecoderPass:
        """Begin a training pass of the student, for ``loss_in_chunks``."""
        return _TransferPass(student, self) if self.transfers else _DistilledPass(student, self)

    def means(self, sums: Tensor) -> dict[str, float]:
        """Return the means per token of NLL and divergence (nats), or of the squared error, from ``sums``."""
        nll, divergence, error, tokens, transferred = sums.tolist()
        logs = {"nll": nll / tokens, "kl": divergence / tokens} if tokens else {}
        return {**logs, **({"transfer_error": error / transferred} if transferred else {})}

    def add(self, **parts: Tensor) -> None:
        """Add to ``sums``, by name: nll, divergence, error, tokens, transferred."""
        names = ("nll", "divergence", "error", "tokens", "transferred")
        device = next(iter(parts.values())).device
        values = [torch.as_tensor(parts.get(name, 0), device=device).detach().double() for name in names]
        self.sums = self.sums.to(device) + torch.stack(values)


class _TaughtPass(DecoderPass, ABC):
    """Decoder pass of a student, in which the teacher's decoder runs first, on the same arguments."""

    def __init__(self, student: PreTrainedModel, distillation: Distillation) -> None:
        """Replace the student's decoder until it is called."""
        super().__init__(student)
        self._distillation = distillation
        self._teacher_decoder = distillation.teacher.model.get_decoder()
        self._replaced = ExitStack()  # the teacher must wait for the pass, in which autocast is as in training
        self._replaced.enter_context(replaced_forward(self._decoder, self._decode))

    def _decode(self, *args: Any, **kwargs: Any) -> Any:
        """Run the teacher's decoder, then the student's."""
        self._replaced.close()
        return self._after_teacher(args, kwargs)

    @abstractmethod
    def _after_teacher(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the teacher, and return the output of the student's decoder."""


class _DistilledPass(_TaughtPass):
    """Decoder pass whose loss mixes the NLL with the divergence from the teacher."""

    def _after_teacher(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the teacher's last hidden states, and run the student's decoder."""
        with torch.no_grad(), self._distillation.teacher.dense_state():
            self._taught = self._teacher_decoder.forward(*args, **kwargs)
        return self._decoder.forward(*args, **kwargs)

    def _chunks(self, targets: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """Yield chunks of last hidden states [n, C], and of the targets [n] with the teacher's states [n, C]."""
        taught = self._taught.last_hidden_state[:, :-1].flatten(0, 1)
        start = 0
        for hidden, ids in super()._chunks(targets):
            yield hidden, (ids, taught[start : start + len(hidden)])
            start += len(hidden)

    def _loss(self, hidden: Tensor, targets: Any, forward: Callable[..., Any]) -> Tensor:
        """Compute the losses of a chunk, float32 [n], and add their parts to the sums."""
        ids, taught = targets
        distillation = self._distillation
        # Compute the student's logits
        logits = self._logits(hidden[None], forward)[0]
        # Compute the teacher's logits, which need no gradient
        teacher = distillation.teacher
        with torch.no_grad(), teacher.dense_head():
            forward = forward_inside(teacher.model)
            reference = logits_of(self._teacher_decoder, type(self._taught), taught[None], forward)[0]
        # Compute the losses and add up their parts
        loss, nll, divergence = distilled(
            logits, reference, ids, weight=distillation.weight, temperature=distillation.temperature
        )
        distillation.add(nll=nll.sum(), divergence=divergence.sum(), tokens=(ids != NO_TARGET).sum())
        return loss


class _TransferPass(_TaughtPass):
    """Pass that runs the teacher's decoder, and the student's attention layers on the teacher's hidden states."""

    def _after_teacher(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the error and its gradients, and return the teacher's output for the logits, which go unused."""
        # Inputs and outputs of the teacher's attention layers
        teacher = self._distillation.teacher
        with torch.no_grad(), teacher.dense_state(), _recorded_calls(teacher.model) as calls:
            output = self._teacher_decoder.forward(*args, **kwargs)
        # Error and gradients of the student's, layer by layer
        layers = list(attention_layers(self._model).values())
        assert len(calls) == len(layers), "the teacher's attention layers are not the student's"
        self._error = torch.zeros((), device=output.last_hidden_state.device)
        self._gradients: dict[nn.Parameter, Tensor] = {}
        for layer in layers:
            self._learn(layer, calls.pop(0), len(layers))
        if not self._gradients:
            raise UserError(
                "branch.distill.hidden trains attention layers, but none of their weights is trained\n"
                "leave it out, or set lora.targets to layers of attention"
            )
        return output

    def _learn(self, layer: nn.Module, call: _Call, num_layers: int) -> None:
        """Add the error of a layer's outputs and its gradients, divided by the number of layers."""
        args, kwargs, target = call
        with torch.enable_grad():
            error = F.mse_loss(layer(*args, **kwargs)[0].float(), target.float()) / num_layers
        parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        if parameters and error.requires_grad:
            gradients = torch.autograd.grad(error, parameters, allow_unused=True)
            self._gradients |= {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
        self._error += error.detach()

    def total(self, targets: Tensor, forward: Callable[..., Any]) -> Tensor:
        """Return the mean squared error times the number of targets, so that their mean is the loss."""
        num_targets = (targets != NO_TARGET).sum()
        self._distillation.add(error=self._error * num_targets, transferred=num_targets)
        gradients = [(gradient * num_targets).to(p.dtype) for p, gradient in self._gradients.items()]
        return with_gradients(self._error * num_targets, gradients, list(self._gradients))


@contextmanager
def _recorded_calls(model: PreTrainedModel) -> Iterator[list[_Call]]:
    """Record arguments and output of each attention layer's call, in order, inside the ``with`` block."""
    calls: list[_Call] = []
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments.append((args, kwargs))

    def after(_layer: nn.Module, _args: Any, output: Any) -> None:
        calls.append((*arguments.pop(), output[0]))

    # Record before the hook that adds the state of gates and windows
    with ExitStack() as hooks:
        for layer in attention_layers(model).values():
            hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        yield calls


def distilled(
    logits: Tensor, reference: Tensor, targets: Tensor, *, weight: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss of tokens, and its parts without gradients: NLL and divergence at the temperature, in nats.

    Args:
        logits: the student's [n, V].
        reference: the teacher's [n, V].
        targets: int64 [n]; ``NO_TARGET`` counts as 0.
        weight: weight of the divergence, in [0, 1].
        temperature: temperature of both predictions.

    Returns:
        (loss, NLL, divergence), float32 [n] each.
    """
    result: tuple[Tensor, Tensor, Tensor] = _Distilled.apply(logits, reference, targets, weight, temperature)  # type: ignore[no-untyped-call]
    return result


class _Distilled(torch.autograd.Function):
    """Loss of ``distilled``, with the gradient in closed form."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, reference: Tensor, targets: Tensor, weight: float, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss and its gradient."""
        scores, is_target = logits.float(), targets != NO_TARGET
        ids = targets.where(is_target, 0)[:, None]
        # Divergence
        log_p = (scores / temperature).log_softmax(-1)
        log_q = (reference.float() / temperature).log_softmax(-1)
        q = log_q.exp()
        divergence = (q * (log_q - log_p)).sum(-1) * is_target
        gradient = log_p.exp().sub_(q).mul_(weight * temperature)
        # NLL
        if temperature != 1.0:
            log_p = scores.log_softmax(-1)
        nll = -log_p.gather(1, ids)[:, 0] * is_target
        if weight < 1.0:
            onehot = torch.full_like(ids, -1, dtype=gradient.dtype)
            gradient.add_(log_p.exp_().scatter_add_(1, ids, onehot), alpha=1.0 - weight)
        # Both
        ctx.save_for_backward(gradient.mul_(is_target[:, None]))
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(nll, divergence)
        return (1.0 - weight) * nll + weight * temperature**2 * divergence, nll, divergence

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        """Scale the saved gradient."""
        (gradient,) = ctx.saved_tensors
        return (grad[0][:, None] * gradient).to(ctx.dtype), None, None, None, None
