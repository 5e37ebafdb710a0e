"""Compute next-token losses in chunks of tokens, so that the logits of all tokens are never in memory at once.

The logits of a chunk are computed by the model's forward pass, in which the decoder returns last hidden states that it
computed before: the model's soft caps, scales and biases apply, whatever they are (PyTorch's ``linear_cross_entropy``,
new in 2.12, and liger-kernel take only a weight and a bias, and no teacher). The logits of a pass's last positions are
compared with those of a chunk. If they differ, all logits are computed at once, with a warning.

The gradient for the logits of a chunk is written out (``token_losses``): autograd would read and write them a dozen
times, and leave rounding errors where a student and its teacher agree, which AdamW scales up to steps.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from spkv_nas.base import errors, memory

NO_TARGET = -100  # label to ignore
Forward = Callable[..., Any]  # model, or its forward method
_NOT_DRAWN = -1.0  # number in place of a label to draw, where there is none


@dataclass(frozen=True)
class LogitReader:
    """Read the logits of some predictions while the NLL of a pass is computed, which never holds all of them.

    ``columns``, int64 [B, K], are the predictions of each block, ascending and below T - 1. ``read`` is called with the
    number of predictions that came before, and with the logits [n, V] of the next ones, block by block.
    """

    columns: Tensor
    read: Callable[[int, Tensor], None]

    def rows(self, block_size: int) -> Tensor:
        """Return the predictions among those of all blocks, which have ``block_size`` - 1 each; int64 [B K]."""
        starts = torch.arange(len(self.columns), device=self.columns.device) * (block_size - 1)
        return (starts[:, None] + self.columns).flatten()


def at_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Return values [B, K, C] at the columns, int64 [B, K], of each block, from those of all tokens [B, T, C]."""
    blocks = torch.arange(len(columns), device=columns.device)
    return values[blocks[:, None], columns]


def token_nll(model: PreTrainedModel, input_ids: Tensor, **positions: Tensor) -> Tensor:
    """Compute the NLL, float32 [B, T - 1], of tokens [B, T]; warns if all logits were computed at once.

    ``positions`` are empty, or ``position_ids`` [B, T] (``Boundaries.inputs``).
    """
    return read_nll(model, {"input_ids": input_ids, **positions}, None)


def read_nll(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], reader: LogitReader | None
) -> Tensor:
    """Compute ``token_nll`` of the ``inputs`` of a pass, while ``reader`` reads some of its logits."""
    positions = dict(inputs)
    input_ids = positions.pop("input_ids")
    decoder_pass = _large_pass(model, input_ids, **positions)
    if decoder_pass is not None:
        return decoder_pass.losses(input_ids[:, 1:], model, reader)
    logits = model(input_ids=input_ids, use_cache=False, **positions).logits
    if reader is not None:
        reader.read(0, at_columns(logits, reader.columns).flatten(0, 1))
    # Block by block, so that the float32 copy stays in the CPU cache
    nlls = [
        F.cross_entropy(block[:-1].float(), ids[1:], reduction="none")
        for block, ids in zip(logits, input_ids, strict=True)
    ]
    return torch.stack(nlls)


def target_tokens(input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Return the tokens to predict, int64 [B, T - 1]: ``NO_TARGET`` for the first of a document, as filling is."""
    targets = input_ids[:, 1:]
    if position_ids is None:
        return targets
    return targets.masked_fill(position_ids[:, 1:] == 0, NO_TARGET)


def mean_nll(model: PreTrainedModel, input_ids: Tensor, **positions: Tensor) -> Tensor:
    """Compute the mean of ``token_nll`` over ``target_tokens``, with gradients; 0 without any. Warns as it does."""
    targets = target_tokens(input_ids, **positions)
    decoder_pass = _large_pass(model, input_ids, **positions)
    if decoder_pass is not None:
        total = decoder_pass.total(targets, model)
    else:
        logits = _predictions(model, input_ids, **positions)
        total = _whole_total(logits, None, targets.flatten())
    return total / (targets != NO_TARGET).sum().clamp_min(1)


def _predictions(model: PreTrainedModel, input_ids: Tensor, **positions: Tensor) -> Tensor:
    """Compute the logits [B (T - 1), V] of all tokens but the last of each block, in one pass."""
    logits: Tensor = model(input_ids=input_ids, use_cache=False, **positions).logits
    return logits[:, :-1].flatten(0, 1)


def mean_divergence(
    model: PreTrainedModel,
    input_ids: Tensor,
    reference: Callable[[], AbstractContextManager[object]],
    **positions: Tensor,
) -> Tensor:
    """Compute the KL divergence of next-token distributions from a reference's, in nats per token, with gradients.

    It is the mean over the predictions of ``target_tokens`` of ``input_ids`` [B, T]. ``reference`` returns a context in
    which the model's passes are the reference's. Other arguments and warnings are those of ``token_nll``.
    """
    targets = target_tokens(input_ids, **positions)
    decoder_pass = _large_pass(model, input_ids, **positions)
    if decoder_pass is not None:
        with torch.no_grad(), reference():
            decoder_pass.taught = model.get_decoder()(
                input_ids=input_ids, use_cache=False, **positions
            )
        total = decoder_pass.total(targets, model)
    else:
        logits = _predictions(model, input_ids, **positions)
        with torch.no_grad(), reference():
            reference_logits = _predictions(model, input_ids, **positions)
        total = _whole_total(logits, reference_logits, targets.flatten())
    return total / (targets != NO_TARGET).sum().clamp_min(1)


def sampled_nlls(
    model: PreTrainedModel, input_ids: Tensor, uniforms: Tensor, **positions: Tensor
) -> Iterator[Tensor]:
    """Yield sums of the NLL of tokens that the model itself draws, one after every prefix, with gradients.

    The mean square of such a sum's gradient is the Fisher information of the predictions of ``target_tokens`` of
    ``input_ids`` [B, T], which is the second derivative of their divergence from the model's own. The sums share one
    pass, so all but the last must keep the graph of their gradients.

    Args:
        model: the model that draws and predicts.
        input_ids: tokens, int64 [B, T].
        uniforms: random numbers in [0, 1), float [draws, B, T - 1], at which the cumulated probabilities are cut.
        positions: as in ``token_nll``, which also names the warnings.
    """
    is_target = target_tokens(input_ids, **positions) != NO_TARGET
    numbers = uniforms.to(input_ids.device).where(is_target, _NOT_DRAWN)
    decoder_pass = _large_pass(model, input_ids, **positions)
    if decoder_pass is not None:
        decoder_pass.draws = True
        for draw in numbers:
            yield decoder_pass.total(draw, model)
        return
    logits = _predictions(model, input_ids, **positions)
    for draw in numbers:
        yield _whole_total(logits, None, _drawn(logits, draw.flatten()))


@torch.no_grad()
def _drawn(logits: Tensor, numbers: Tensor) -> Tensor:
    """Draw a token from each distribution, of logits [n, V], by a number [n]; ``NO_TARGET`` for ``_NOT_DRAWN``."""
    cumulated = logits.float().softmax(-1).cumsum(-1)
    drawn = (cumulated < numbers[:, None].float()).sum(-1).clamp_max(logits.shape[-1] - 1)
    return drawn.where(numbers != _NOT_DRAWN, NO_TARGET)


@torch.no_grad()
def token_losses(
    logits: Tensor,
    reference: Tensor | None,
    targets: Tensor,
    weight: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute NLL and divergence of tokens, float32 [n] in nats, and the gradient of their mixture for the logits.

    The mixture of a token, and its gradient, exactly 0 for ``weight`` 1 where both predictions agree, are::

        (1 - weight) NLL + weight t^2 KL(softmax(reference / t) || softmax(logits / t))
        (1 - weight) (p - onehot) + weight t (p_t - q_t)

    Args:
        logits: [n, V], in any dtype; without gradients, the gradient is None, otherwise of their shape and dtype.
        reference: a teacher's logits [n, V]; None for a ``weight`` of 0, where divergences are 0.
        targets: int64 [n]; losses and gradients are 0 where they are ``NO_TARGET``.
        weight: weight of the divergence, in [0, 1].
        temperature: temperature t of the divergence.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    is_target = targets != NO_TARGET
    ids = targets.where(is_target, 0)[:, None]
    # NLL, and its slope for the target's logit, as a gather from the gradient would keep that in float32
    log_p = logits.to(dtype).log_softmax(-1)
    target_log_p = log_p.gather(1, ids)
    nll = (-target_log_p[:, 0]).where(is_target, 0.0)
    slope = (1.0 - weight) * target_log_p.expm1()
    # Divergence, and its slope
    divergence = torch.zeros_like(nll)
    log_p_t = log_p
    q = log_p
    if reference is not None:
        if temperature != 1.0:
            log_p_t = (logits.to(dtype) / temperature).log_softmax(-1)
            reference = reference.to(dtype) / temperature
        log_q = reference.to(dtype).log_softmax(-1)
        excess = log_p_t.gather(1, ids).exp() - log_q.gather(1, ids).exp()
        slope += weight * temperature * excess
        q = log_q.exp()
        divergence = log_q.sub_(log_p_t).mul_(q).sum(-1).where(is_target, 0.0)
    if not logits.requires_grad:
        return nll, divergence, None
    # Gradient, but for the targets
    if reference is None:
        gradient = log_p.exp_()
    elif temperature == 1.0:
        gradient = log_p.exp_().sub_(q, alpha=weight)
    else:
        gradient = log_p_t.exp_().sub_(q).mul_(weight * temperature)
        if weight < 1.0:
            gradient.add_(log_p.exp_(), alpha=1.0 - weight)
    gradient = gradient.mul_(is_target[:, None]).to(logits.dtype)
    # Gradient for the logits of targets
    slope = slope.where(is_target[:, None], 0.0)
    gradient = gradient.scatter_(1, ids, slope.to(logits.dtype))
    return nll, divergence, gradient


@contextmanager
def compiled_losses() -> Iterator[None]:
    """Compile ``token_losses`` inside the ``with`` block: it passes over logits three times, not nine."""
    with replaced(sys.modules[__name__], "token_losses", torch.compile(token_losses)):
        yield


def _whole_total(logits: Tensor, reference: Tensor | None, targets: Tensor) -> Tensor:
    """Sum the NLL of logits [n, V], or the divergence from ``reference`` if it is given, with gradients."""
    if reference is None:
        losses, _, gradient = token_losses(logits, None, targets)
    else:
        _, losses, gradient = token_losses(logits, reference, targets, weight=1.0)
    total = losses.sum()
    if gradient is None:
        return total
    result: Tensor = _Loss.apply(total, [gradient], logits)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def loss_in_chunks(
    model: PreTrainedModel, begin_pass: "Callable[[PreTrainedModel], DecoderPass] | None" = None
) -> Iterator[None]:
    """Compute the loss of passes with ``labels`` in chunks inside the ``with`` block, from last hidden states.

    The model calls the loss within its forward pass, as DDP and FSDP2 require, and adds its auxiliary losses as usual,
    such as those of mixtures of experts. Logits are compared in the first pass only, because that waits for the device.
    ``begin_pass`` starts the decoder pass of another loss than the NLL. Warns as ``token_nll``. Raises ``UserError`` if
    ``begin_pass`` is given, but the model does not compute logits from last hidden states alone.
    """
    chunked_loss = _ChunkedLoss(model, begin_pass)
    hook = model.register_forward_pre_hook(chunked_loss.begin, with_kwargs=True)
    try:
        with replaced(model, "_loss_function", chunked_loss.loss):
            yield
    finally:
        hook.remove()


class _ChunkedLoss:
    """Loss function of a model that computes the loss of a pass in chunks, and the pre-hook that prepares each pass."""

    def __init__(
        self, model: PreTrainedModel, begin_pass: "Callable[[PreTrainedModel], DecoderPass] | None"
    ) -> None:
        """Take the place of the present loss of ``model``; arguments and errors are those of ``loss_in_chunks``."""
        self._model = model
        self._model_loss = model.loss_function
        self._begin_pass = begin_pass
        if begin_pass is not None and not _keeps_some(model, self._model_loss, warns=False):
            raise _not_in_chunks(model)
        # Decoder pass of the present pass, and the arguments to compute all of its logits with
        self._pending: list[tuple[DecoderPass, dict[str, Any]]] = []
        # Whether logits of chunks are those of the whole pass; None before the first pass
        self._chunks_agree: bool | None = None

    def begin(
        self, _model: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        """Begin a pass with labels: capture the decoder pass, and ask for the logits of the last position only."""
        self._pending.clear()
        labels = kwargs.get("labels")
        if labels is None:
            return None
        model = self._model
        can_chunk = self._chunks_agree is not False  # it may not have been tried yet
        is_large = labels.numel() > _chunk_tokens(model)
        if self._begin_pass is None and not (
            can_chunk and _keeps_some(model, self._model_loss, warns=is_large)
        ):
            return None
        decoder_pass = (self._begin_pass or DecoderPass)(model)
        self._pending.append((decoder_pass, {**kwargs, "labels": None}))
        return args, {**kwargs, "logits_to_keep": 1}

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the loss from the decoder pass, or from all logits where there is none, as the model's own loss."""
        if self._pending:
            decoder_pass, arguments = self._pending.pop()
            forward = forward_inside(self._model)
            if self._chunks_agree is None:
                self._chunks_agree = decoder_pass.makes(logits, forward)
            if self._chunks_agree:
                targets = labels[:, 1:]
                count = num_items_in_batch
                if count is None:
                    count = (targets != NO_TARGET).sum()
                total = decoder_pass.total(targets, forward)
                return total / torch.as_tensor(count, device=total.device)
            if self._begin_pass is not None:
                raise _not_in_chunks(self._model)
            logits = forward(**arguments).logits
        result: Tensor = self._model_loss(
            logits, labels, *args, num_items_in_batch=num_items_in_batch, **kwargs
        )
        return result


def forward_inside(model: PreTrainedModel) -> Forward:
    """Return the ``forward`` of a model, to call inside its own pass.

    Accelerate wraps ``forward`` in one autocast object, which forgets the state to restore if it is entered twice:
    autocast would stay on for the rest of the process. Inside the pass it is on already.
    """
    forward: Forward = vars(model).get("_original_forward", model.forward)
    return forward


class DecoderPass:
    """Record the last hidden states of a model's next decoder pass, and compute logits and the NLL from them.

    Subclasses compute other losses. The methods take ``forward``: the model, or the model's ``forward`` inside a pass,
    where hooks must not run again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Record the next pass of the decoder of ``model``."""
        self._model = model
        self._decoder = model.get_decoder()
        self._output: Any = None
        self.taught: Any = None  # output of another pass to compare the pass with
        self.draws = False  # whether targets are numbers in [0, 1), by which tokens are drawn
        self._hook = self._decoder.register_forward_hook(self._see)

    def _see(self, _decoder: nn.Module, _args: tuple[object, ...], output: Any) -> None:
        """Store the output of the pass, and remove the hook."""
        self._output = output
        self._hook.remove()

    def makes(self, last: Tensor, forward: Forward) -> bool:
        """Return whether the pass's last logits [B, 1, V] depend on the last hidden states alone; warn if not."""
        self._hook.remove()
        hidden = getattr(self._output, "last_hidden_state", None)
        if hidden is not None:
            with torch.no_grad():
                recomputed = logits_of(self._decoder, type(self._output), hidden[:, -1:], forward)
            if torch.allclose(recomputed.float(), last.float(), rtol=0.0, atol=0.0, equal_nan=True):
                return True
        _warn(self._model)
        return False

    @torch.no_grad()
    def losses(
        self, targets: Tensor, forward: Forward, reader: LogitReader | None = None
    ) -> Tensor:
        """Compute the loss at every position but the last of each block, float32 [B, T - 1], without gradients."""
        chunk_losses = []
        rows = None if reader is None else reader.rows(targets.shape[1] + 1)
        start = 0
        for states, ids, taught in self._chunks(targets):
            logits = self._logits(states, forward)
            losses, _ = self._losses(logits, ids, taught, forward)
            chunk_losses.append(losses)
            end = start + len(ids)
            if reader is not None and rows is not None:
                # Rows of this chunk; they are ascending
                bounds = torch.tensor([start, end], device=rows.device)
                first, last = torch.searchsorted(rows, bounds).tolist()
                if first < last:
                    reader.read(first, logits[rows[first:last] - start])
            start = end
            del logits  # before the next chunk's
        return torch.cat(chunk_losses).view(targets.shape[:2])

    def total(self, targets: Tensor, forward: Forward) -> Tensor:
        """Compute the sum of ``losses`` with gradients, summed in float32; by chunks, so logits are computed once."""
        if not torch.is_grad_enabled():
            return self.losses(targets, forward).sum()
        parameters = [
            parameter for parameter in self._model.parameters() if parameter.requires_grad
        ]
        # Gradients of the parameters that the logits depend on, by number
        sums: dict[int, Tensor] = {}
        hidden = self._output.last_hidden_state
        hidden_gradients = []
        total = torch.zeros((), device=hidden.device)
        # Accumulate losses and gradients over chunks
        for states, ids, taught in self._chunks(targets):
            chunk = states.detach().requires_grad_()
            logits = self._logits(chunk, forward)
            losses, gradient = self._losses(logits, ids, taught, forward)
            hidden_gradient, *parameter_gradients = torch.autograd.grad(
                logits, [chunk, *parameters], gradient, allow_unused=True
            )
            total += losses.sum()
            del logits, gradient  # before the next chunk's
            hidden_gradients.append(hidden_gradient)
            for number, gradient in enumerate(parameter_gradients):
                if gradient is not None and number in sums:
                    sums[number].add_(gradient)
                elif gradient is not None:
                    sums[number] = gradient.float()
        # Return them as one autograd node
        inputs = [parameters[number] for number in sums]
        gradients = [
            gradient.to(parameter.dtype)
            for parameter, gradient in zip(inputs, sums.values(), strict=True)
        ]
        of_hidden = torch.cat(hidden_gradients).view(*targets.shape[:2], -1)
        of_hidden = F.pad(of_hidden, (0, 0, 0, 1))  # zeros for the last positions
        result: Tensor = _Loss.apply(total, [of_hidden, *gradients], hidden, *inputs)  # type: ignore[no-untyped-call]
        return result

    def _chunks(self, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield chunks of last hidden states [n, C], of targets [n], and of the states of ``taught`` if it is set."""
        device = str(self._output.last_hidden_state.device)
        num_bytes = memory.chunk_bytes(device) if torch.is_grad_enabled() else None
        size = _chunk_tokens(self._model, num_bytes)
        hidden = self._output.last_hidden_state[:, :-1].flatten(0, 1)
        hidden_chunks = torch.split(hidden, size)
        target_chunks = torch.split(targets.flatten(0, 1), size)
        if self.taught is None:
            return zip(hidden_chunks, target_chunks, repeat(None), strict=False)
        taught = self.taught.last_hidden_state[:, :-1].flatten(0, 1)
        return zip(hidden_chunks, target_chunks, torch.split(taught, size), strict=True)

    def _losses(
        self, logits: Tensor, targets: Tensor, taught: Tensor | None, forward: Forward
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a chunk's losses, float32 [n], and the gradient for its logits [n, V] if they have one.

        They are NLLs, or with ``taught`` [n, C] divergences from the predictions of that pass.
        """
        if self.draws:
            targets = _drawn(logits, targets)
        if taught is None:
            nll, _, gradient = token_losses(logits, None, targets)
            return nll, gradient
        with torch.no_grad():
            reference = self._logits(taught, forward)
        _, divergence, gradient = token_losses(logits, reference, targets, 1.0)
        return divergence, gradient

    def _logits(self, hidden: Tensor, forward: Forward) -> Tensor:
        """Compute logits [n, V] from last hidden states [n, C]."""
        # Not an index, whose gradient would be a copy
        return logits_of(self._decoder, type(self._output), hidden[None], forward).squeeze(0)


def logits_of(decoder: nn.Module, output: type, hidden: Tensor, forward: Forward) -> Tensor:
    """Compute logits [B, T, V] with ``forward``, in which ``decoder`` returns the hidden states [B, T, C]."""
    # Only the shape of the tokens counts
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with replaced(decoder, "forward", lambda *_args, **_kwargs: output(last_hidden_state=hidden)):
        logits: Tensor = forward(input_ids=tokens, use_cache=False).logits
        return logits


@contextmanager
def replaced(module: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute of a module, of PyTorch or Python, inside the ``with`` block."""
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)


class _Loss(torch.autograd.Function):
    """Value with precomputed gradients for its inputs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *_inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        """Scale the saved gradients."""
        scaled = [gradient * grad[0].to(gradient.device) for gradient in ctx.saved_tensors]
        return None, None, *scaled


def _large_pass(
    model: PreTrainedModel, tokens: Tensor, **positions: Tensor
) -> "DecoderPass | None":
    """Run the model over ``tokens`` [B, T] and return the decoder pass; None if chunks are not needed or possible."""
    if tokens.numel() <= _chunk_tokens(model) or not _keeps_some(model):
        return None
    decoder_pass = DecoderPass(model)
    last = model(input_ids=tokens, use_cache=False, logits_to_keep=1, **positions).logits
    return decoder_pass if decoder_pass.makes(last, model) else None


def _chunk_tokens(model: PreTrainedModel, num_bytes: int | None = None) -> int:
    """Return ``memory.chunk_tokens`` of a model's vocabulary."""
    return memory.chunk_tokens(model.config.get_text_config().vocab_size, num_bytes)


def _keeps_some(
    model: PreTrainedModel, loss: object = ForCausalLMLoss, *, warns: bool = True
) -> bool:
    """Return whether a model can compute logits of some positions only, and has the usual loss; warn if not."""
    is_possible = (
        loss is ForCausalLMLoss
        and "logits_to_keep" in inspect.signature(type(model).forward).parameters
    )
    if warns and not is_possible:
        _warn(model)
    return is_possible


def _warn(model: PreTrainedModel) -> None:
    """Warn that all logits of a pass are computed at once."""
    warnings.warn(
        f"{type(model).__name__} computes logits in an unsupported way: "
        "those of all tokens of a pass are computed at once, which needs much memory",
        stacklevel=4,
    )


def _not_in_chunks(model: PreTrainedModel) -> errors.UserError:
    """Return the error for a loss that needs logits in chunks, on a model that cannot compute them."""
    return errors.UserError(
        f"{type(model).__name__} computes logits in an unsupported way, "
        "so a teacher's and a student's cannot be compared in chunks\n"
        "leave branch.distill out"
    )
