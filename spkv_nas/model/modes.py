"""Modes of a model: those of its gates and their threshold, evaluation, recomputation, compilation, and dropout."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch
from spkv_kernels.timing import interleaved
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.model import attention, config_section, gates, loss

_COMPILING = 40.0  # seconds that it takes to compile the layers of a model for a GPU
# Bytes of memory traffic that a compiled layer saves per token and channel: half of the difference between 245 and 822
# thousand tokens/s (a plain compiled loop, less a teacher's pass) of a model of 12 layers and 512 channels on an H100,
# on which a copy reaches 3.0 TB/s
_SAVED = 690
_COPIED = 1 << 27  # bytes of the copy whose speed is measured


def gate_settings(model: torch.nn.Module) -> attention.GateSettings:
    """Return a hooked model's gate settings, for reading only. Raises ``UserError``: the model has no gates."""
    gated = [state for state in attention.layer_states(model) if state.gate_window is not None]
    if not gated:
        raise UserError("this model has no gates: call attach_gates(model) first")
    return gated[0].settings


def set_gate_mode(
    model: torch.nn.Module,
    mode: str,
    tau: float | None = None,
    *,
    anneal: float = 0.0,
    p_min: float = 0.0,
) -> None:
    """Set the mode of all gates: ``open``, ``soft``, ``sampled`` or ``hard`` (see ``gate_from_logits``).

    Args:
        model: a model with gates.
        mode: one of "open", "soft", "sampled", "hard".
        tau: new threshold of the model in [0, 1], which ``save`` writes; None keeps the current one.
        anneal: with "soft" or "sampled", the weight ``a`` of the binary gate, ``u~ = (1 - a) u + a 1[u >= tau]``.
        p_min: with "sampled", the minimum probability of either outcome, in [0, 0.5].

    Raises ``UserError``: unknown mode, tau outside [0, 1], or a model without gates.
    """
    if mode not in gates.MODES:
        raise UserError(f"unknown gate mode '{mode}'; expected one of {', '.join(gates.MODES)}")
    if tau is not None and not 0.0 <= tau <= 1.0:
        raise UserError(f"tau must lie in [0, 1]; found {tau}")
    settings = gate_settings(model)
    tau = settings.tau if tau is None else tau
    _put(model, settings, replace(settings, mode=mode, tau=tau, anneal=anneal, p_min=p_min))


def set_price(model: torch.nn.Module, price: torch.Tensor | float) -> None:
    """Set the price of keys: the loss gains ``price * mean(u)``, averaged over gated layers, heads and tokens.

    SP-KV paper, appendix "Controlling sparsity at train time", "Regularization", where lambda_aux is -price. A tensor
    is not read back from its device.
    """
    num_layers = len(gates.predictors(model))
    if num_layers:
        part = price / num_layers
        if isinstance(part, torch.Tensor):
            gate_settings(model).price = part.float()
        else:
            gate_settings(model).price = part or None


@contextmanager
def gate_mode(model: torch.nn.Module, mode: str, tau: float | None = None) -> Iterator[None]:
    """Set the mode of the gates inside the ``with`` block, and restore the previous settings after it."""
    settings = gate_settings(model)
    before = replace(settings)
    try:
        set_gate_mode(model, mode, tau)
        yield
    finally:
        _put(model, settings, before)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the ``with`` block, and restore each module's mode after it."""
    before = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training


def decoder_layers(model: torch.nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the decoder layers that can be recomputed and compiled; empty for classes without recognisable ones."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _decoder_layers(
    model: PreTrainedModel, verb: str, option: str
) -> list[GradientCheckpointingLayer]:
    """Return the decoder layers that transformers can recompute. Raises ``UserError`` about ``option`` without any."""
    layers = decoder_layers(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no decoder layers to {verb}: leave {option} out"
        )
    return layers


@contextmanager
def recomputed(model: PreTrainedModel) -> Iterator[None]:
    """Recompute the activations of decoder layers in backward passes inside the ``with`` block.

    ``gradient_checkpointing_enable`` cannot be undone, enables gradients of embeddings even if nobody needs them, and
    may use the reentrant variant, which would drop gradients of values that hooks captured inside a layer. Raises
    ``UserError``: the class has no layers that support it.
    """
    layers = _decoder_layers(model, "recompute", "gradient_checkpointing")
    # Enable checkpointing, which layers apply in training mode only
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.training = True  # the layer only, not its submodules
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            del layer.gradient_checkpointing, layer._gradient_checkpointing_func
            layer.training = training


@contextmanager
def compiled(*models: PreTrainedModel) -> Iterator[None]:
    """Compile the decoder layers of models one by one inside the ``with`` block, so that all share the same graphs.

    The loss of a chunk is compiled too; embeddings, logits and the mask of a batch, which depends on data, are not.
    Layers that are ``recomputed`` are compiled inside the checkpoint. Raises ``UserError``: a class has no recognisable
    decoder layers, or this machine cannot compile them.
    """
    from torch._dynamo.exc import TorchDynamoException

    layers = [layer for model in models for layer in _decoder_layers(model, "compile", "compile")]
    checkpoints = {
        layer: layer._gradient_checkpointing_func
        for layer in layers
        if layer.gradient_checkpointing
    }
    compile_once = cache(torch.compile)
    with _outside_graphs(*models), loss.compiled_losses():
        # Compile whole calls of layers, or of recomputed ones what PyTorch's checkpoint calls, forward and again
        for layer in layers:
            if layer in checkpoints:
                layer._gradient_checkpointing_func = partial(
                    _compiled_checkpoint, checkpoints[layer], compile_once
                )
            else:
                layer.compile()
        try:
            yield
        except TorchDynamoException as error:
            raise UserError(
                f"the model cannot be compiled here: {first_line(error)}\nset compile: false"
            ) from error
        finally:
            for layer in layers:
                layer._compiled_call_impl = None  # PyTorch has no public call to undo compile()
            for layer, function in checkpoints.items():
                layer._gradient_checkpointing_func = function


def compiled_if_faster(model: PreTrainedModel, num_tokens: int) -> AbstractContextManager[None]:
    """Return ``compiled(model)`` where ``gains_by_compiling`` says so for its device, else a context without effect."""
    gains = gains_by_compiling(model, num_tokens, str(model.device))
    return compiled(model) if gains else nullcontext()


def gains_by_compiling(model: PreTrainedModel, num_tokens: int, device: str) -> bool:
    """Return whether compiled layers save more time than compiling takes, in training on ``num_tokens`` of a process.

    They do on a GPU, if they save more than ``_COMPILING`` seconds at the speed of a copy, which is measured, unless
    the class has no recognisable layers or the model is on several devices. Warns, and returns False, where they would,
    but nothing can be compiled.
    """
    is_spread = hasattr(model, "hf_device_map")
    if is_spread or not device.startswith("cuda") or not decoder_layers(model):
        return False
    config = model.config.get_text_config()
    saved = _SAVED * num_tokens * config.num_hidden_layers * config.hidden_size  # bytes
    return saved / _copy_speed(device) > _COMPILING and _can_compile(device)


def _copy_speed(device: str) -> float:
    """Measure the bytes that a copy reads and writes in a second."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    return 2 * _COPIED / interleaved({"copy": source.clone}, 5, device)["copy"]


def _can_compile(device: str) -> bool:
    """Return whether ``torch.compile`` works on a device; warn if not, such as without a C++ compiler or Triton."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        torch.compile(lambda x: x + 1.0)(torch.zeros(2, device=device))
    except (TorchDynamoException, RuntimeError) as error:
        warnings.warn(
            f"training without compiled layers, which are faster: {first_line(error)}", stacklevel=4
        )
        return False
    return True


def _compiled_checkpoint(
    recompute: Callable[..., Any],
    compile_once: Callable[..., Any],
    call: "partial[Any]",
    *inputs: Any,
) -> Any:
    """Recompute ``call``, of a layer's class, compiled: PyTorch compiles nothing that a checkpoint calls by itself."""
    return recompute(partial(compile_once(call.func), *call.args, **call.keywords), *inputs)


@contextmanager
def _outside_graphs(*models: torch.nn.Module) -> Iterator[None]:
    """Exclude the models' hooks and the attention function from ``torch.compile`` inside the ``with`` block.

    Prices and annealing change from step to step, and the attention operator is a kernel, which gains nothing.
    """
    # Wrap hook and attention function
    uncompiled_hook = torch.compiler.disable(attention._pre_hook)  # type: ignore[no-untyped-call]
    uncompiled_function = torch.compiler.disable(attention._attention_function)  # type: ignore[no-untyped-call]
    hooks = [
        layer._forward_pre_hooks
        for model in models
        for layer in attention.hooked_layers(model).values()
    ]

    def exchange(old_hook: Callable[..., Any], new_hook: Callable[..., Any]) -> None:
        for layer_hooks in hooks:
            for number, hook in layer_hooks.items():
                if hook is old_hook:
                    layer_hooks[number] = new_hook

    # Install the wrappers for the block
    AttentionInterface.register("spkv", uncompiled_function)
    exchange(attention._pre_hook, uncompiled_hook)
    try:
        yield
    finally:
        AttentionInterface.register("spkv", attention._attention_function)
        exchange(uncompiled_hook, attention._pre_hook)


def turn_off_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of a loaded model to 0, in place; its config, which is saved with it, stays as it is."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Attention layers pass theirs to their function
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _put(
    model: torch.nn.Module, settings: attention.GateSettings, values: attention.GateSettings
) -> None:
    """Make ``settings`` equal to ``values``, and the config's tau too."""
    for name, value in asdict(values).items():
        setattr(settings, name, value)
    config_section.write_tau(model, settings.tau)
