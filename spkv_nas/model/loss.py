"""Next-token losses a chunk of tokens at a time, so that the logits of all tokens are never there at once.

They would be the largest tensor of a pass by far: 16,384 tokens of a vocabulary of 152 thousand take 10 GB in float32.
A pass whose logits are no more than one chunk is computed in one piece, as the model does it.

Logits of a chunk are made by the model's own forward pass, in which the decoder only hands back the last hidden states
that it had computed: soft caps, scales and biases are the model's, whatever they are. PyTorch's
``linear_cross_entropy``, liger-kernel and cut-cross-entropy take a weight and a bias in their place, and the latter two
a GPU. Every pass has the logits of its last positions from the model itself; where a chunk gives others, the model does
more than that, and all logits are made at once, with a warning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from spkv_nas.base.memory import chunk_tokens
from spkv_nas.model.model_shape import vocabulary_size

NO_TARGET = -100  # a label that is not predicted


def token_nll(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """NLL of every token but a block's first: float32 [B, T - 1], in nats, of int64 ``tokens`` [B, T].

    Warns:
        UserWarning: there are several chunks, but all logits had to be made at once.
    """
    if (decoder_pass := _large_pass(model, tokens)) is not None:
        return decoder_pass.losses(tokens[:, 1:], model)
    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.stack(  # block by block: the float32 copies of one stay in the processor's cache
        [
            F.cross_entropy(block[:-1].float(), ids[1:], reduction="none")
            for block, ids in zip(logits, tokens, strict=True)
        ]
    )


def mean_nll(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The mean of ``token_nll``, with gradients. Warns as it does."""
    if (decoder_pass := _large_pass(model, tokens)) is not None:
        return decoder_pass.total(tokens[:, 1:], model) / tokens[:, 1:].numel()
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def mean_divergence(
    model: PreTrainedModel, tokens: Tensor, reference: Callable[[], AbstractContextManager[object]]
) -> Tensor:
    """KL divergence of the next token's distribution from a reference's, in nats per token, with gradients.

    The mean over all tokens of ``tokens`` [B, T] but a block's first, as ``mean_nll``.

    Args:
        reference: makes a context in which the model's passes are the reference's.

    Warns:
        UserWarning: as ``token_nll``.
    """
    decoder_pass, decoder = _large_pass(model, tokens), model.get_decoder()
    if decoder_pass is None:
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        with torch.no_grad(), reference():
            wanted = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return _divergence(logits, wanted).mean()
    with torch.no_grad(), reference():
        hidden = decoder(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    return decoder_pass.total(hidden, model) / tokens[:, 1:].numel()


def _divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """KL of softmax(``wanted``) from softmax(``logits``), both [..., V]: float32 [...]."""
    target = wanted.float().log_softmax(-1)
    return F.kl_div(logits.float().log_softmax(-1), target, reduction="none", log_target=True).sum(-1)


@contextmanager
def loss_in_chunks(model: PreTrainedModel) -> Iterator[None]:
    """Inside the ``with`` block, passes with ``labels`` compute their loss in chunks where there are several.

    The model asks for it within its own forward pass, which is what DDP and FSDP2 need, and still adds what it adds to
    it by itself, as mixtures of experts do.

    Warns:
        UserWarning: as ``token_nll``.
    """
    own, before = model.loss_function, vars(model).get("_loss_function")
    running: list[tuple[_DecoderPass, dict[str, Any]]] = []
    trusted = True

    def begin(_model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        running.clear()
        labels = kwargs.get("labels")
        if labels is None or not trusted or not _is_large(model, labels) or not _keeps_some(model, own):
            return None
        running.append((_DecoderPass(model), {**kwargs, "labels": None}))
        return args, {**kwargs, "logits_to_keep": 1}

    def loss(logits: Tensor, labels: Tensor, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
        nonlocal trusted
        if running:
            decoder_pass, arguments = running.pop()
            if decoder_pass.makes(logits, model.forward):
                count = (labels[:, 1:] != NO_TARGET).sum() if num_items_in_batch is None else num_items_in_batch
                total = decoder_pass.total(labels[:, 1:], model.forward)
                return total / torch.as_tensor(count, device=total.device)
            trusted = False
            logits = model.forward(**arguments).logits
        result: Tensor = own(logits, labels, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        return result

    hook = model.register_forward_pre_hook(begin, with_kwargs=True)
    model.loss_function = loss
    try:
        yield
    finally:
        hook.remove()
        del model._loss_function
        if before is not None:
            model.loss_function = before


class _DecoderPass:
    """Watches the next pass of a model's decoder, and makes logits of the last hidden states that it ends with.

    Its methods take ``forward``: the model, or the model's ``forward`` inside a pass, where hooks must not run again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._output: Any = None
        self._hook = self._decoder.register_forward_hook(self._see)

    def _see(self, _decoder: nn.Module, _args: Any, output: Any) -> None:
        self._output = output
        self._hook.remove()

    def makes(self, last: Tensor, forward: Callable[..., Any]) -> bool:
        """Whether the pass's own logits [B, 1, V] of the last positions come of the last hidden states alone; warns."""
        self._hook.remove()
        hidden = getattr(self._output, "last_hidden_state", None)
        if hidden is not None:
            with torch.no_grad():
                again = self._logits(hidden[:, -1:], forward)
            if torch.allclose(again.float(), last.float(), rtol=0.0, atol=0.0, equal_nan=True):
                return True
        _warn(self._model)
        return False

    def losses(self, targets: Tensor, forward: Callable[..., Any]) -> Tensor:
        """float32 [B, T - 1] of all hidden states but a block's last.

        Args:
            targets: int64 [B, T - 1], the tokens after them: the losses are their NLL; or last hidden states
                [B, T - 1, C] of a reference: the losses are the divergence from its predictions.
        """
        return torch.cat([self._loss(*part, forward) for part in self._chunks(targets)]).view(targets.shape[:2])

    def total(self, targets: Tensor, forward: Callable[..., Any]) -> Tensor:
        """The sum of ``losses``, with gradients: those of a chunk are computed with it, and its logits not made twice.

        The weights' are summed in float32.
        """
        if not torch.is_grad_enabled():
            return self.losses(targets, forward).sum()
        learning = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        sums: dict[int, Tensor] = {}  # of the gradients of those that the logits depend on
        hidden = self._output.last_hidden_state
        of_hidden, total = [], torch.zeros((), device=hidden.device)
        for states, ids in self._chunks(targets):
            own = states.detach().requires_grad_()
            loss = self._loss(own, ids, forward).sum()
            first, *others = torch.autograd.grad(loss, [own, *learning], allow_unused=True)
            total += loss.detach()
            of_hidden.append(first)
            for number, gradient in enumerate(others):
                if gradient is not None:
                    sums[number] = gradient.float() if number not in sums else sums[number].add_(gradient)
        inputs = [learning[number] for number in sums]
        gradients = [gradient.to(parameter.dtype) for parameter, gradient in zip(inputs, sums.values(), strict=True)]
        of_all = F.pad(torch.cat(of_hidden).view(*targets.shape[:2], -1), (0, 0, 0, 1))  # zeros for the last positions
        result: Tensor = _Loss.apply(total, [of_all, *gradients], hidden, *inputs)  # type: ignore[no-untyped-call]
        return result

    def _chunks(self, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Last hidden states [n, C] and their targets [n] or [n, C], chunk by chunk."""
        size = chunk_tokens(vocabulary_size(self._model))
        hidden: Tensor = self._output.last_hidden_state[:, :-1].flatten(0, 1)
        return zip(torch.split(hidden, size), torch.split(targets.flatten(0, 1), size), strict=True)

    def _loss(self, hidden: Tensor, targets: Tensor, forward: Callable[..., Any]) -> Tensor:
        """float32 [n] of a chunk."""
        logits = self._logits(hidden[None], forward)[0]
        if targets.is_floating_point():
            with torch.no_grad():
                wanted = self._logits(targets[None], forward)[0]
            return _divergence(logits, wanted)
        return F.cross_entropy(logits.float(), targets, reduction="none", ignore_index=NO_TARGET)

    def _logits(self, hidden: Tensor, forward: Callable[..., Any]) -> Tensor:
        """[B, T, V] of last hidden states [B, T, C]."""
        before = vars(self._decoder).get("forward")
        answer = type(self._output)(last_hidden_state=hidden)
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)  # only their shape counts
        self._decoder.forward = lambda *_args, **_kwargs: answer
        try:
            logits: Tensor = forward(input_ids=tokens, use_cache=False).logits
            return logits
        finally:
            del self._decoder.forward
            if before is not None:
                self._decoder.forward = before


class _Loss(torch.autograd.Function):
    """A number with the gradients that it is known to have."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *_inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        return None, None, *(gradient * grad[0].to(gradient.device) for gradient in ctx.saved_tensors)


def _large_pass(model: PreTrainedModel, tokens: Tensor) -> _DecoderPass | None:
    """The pass over ``tokens`` [B, T], if there are several chunks and it can give them."""
    if not _is_large(model, tokens) or not _keeps_some(model):
        return None
    decoder_pass = _DecoderPass(model)
    last = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
    return decoder_pass if decoder_pass.makes(last, model) else None


def _is_large(model: PreTrainedModel, tokens: Tensor) -> bool:
    return tokens.numel() > chunk_tokens(vocabulary_size(model))


def _keeps_some(model: PreTrainedModel, loss: Any = ForCausalLMLoss) -> bool:
    """Whether the model can be asked for logits of some positions alone, and a loss is the usual one; warns if not."""
    can = loss is ForCausalLMLoss and "logits_to_keep" in inspect.signature(type(model).forward).parameters
    if not can:
        _warn(model)
    return can


def _warn(model: PreTrainedModel) -> None:
    warnings.warn(
        f"{type(model).__name__} makes its logits in a way of its own: those of all tokens of a pass are made at once, "
        "which takes much memory",
        stacklevel=4,
    )
