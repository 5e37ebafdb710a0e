"""Gates and per-head windows on any Hugging Face decoder that uses the attention interface.

``attach_gates`` and ``apply_layout`` switch a model to the attention function ``spkv``, find its attention layers by
watching which modules reach that function, and put a forward pre-hook on each. The hook computes the layer's gate
from the layer's own (normalised) input and hands it on by keyword, which keeps ``torch.compile`` and activation
checkpointing working. ``detach`` undoes all of it.

What would change the maths without anybody noticing is refused with a ``UserError``: soft-capping, learned sinks,
attention dropout, padding, packed position ids, a key-value cache, requests for attention weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from spkv_kernels import attention
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from spkv_nas.artifacts.gate_config import GATED, GLOBAL, LOCAL, GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.model.gates import MODES, FixedGates, UtilityPredictor, gate_from_logits, regularised

GLOBAL_WINDOW = 1 << 30  # a window no sequence outgrows

_REFUSED_KEYWORDS = {
    "softcap": "soft-capping of attention scores",
    "s_aux": "learned attention sinks",
    "position_bias": "a position bias",
}


# (q [B, Hq, T, D], k, v [B, Hkv, T, D], scale of the scores) of a layer, to [B, Hq, T, D] in place of its attention,
# or to None: the layer's attention is what it would be without the observer
Observer = Callable[[Tensor, Tensor, Tensor, float], Tensor | None]


@dataclass
class LayerState:
    """What the hook of one attention layer knows. Lives on the layer, so that copies of the model keep it."""

    num_kv_heads: int
    native_window: int | None  # the checkpoint's own sliding window on this layer
    windows: tuple[int, ...] | None = None  # per KV head, from a layout, or where no head has a gate
    gate_window: int | None = None  # w of the gates; None: no gates
    sinks: tuple[int, ...] = ()  # first tokens that the gates always keep, per KV head
    mode: str = "soft"
    tau: float = 0.5
    anneal: float = 0.0
    p_min: float = 0.0
    density_weight: float = 0.0  # of the layer's mean utility in the loss
    observer: Observer | None = None
    _window_tensor: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def set_windows(self, windows: tuple[int, ...] | None) -> None:
        """Replace ``windows``."""
        self.windows, self._window_tensor = windows, None

    def window_tensor(self, device: torch.device) -> Tensor:
        """``windows`` as an int tensor on ``device``; made there once, because a copy to a GPU waits for it."""
        assert self.windows is not None
        if self._window_tensor is None or self._window_tensor.device != device:
            with torch.inference_mode(False):  # a later backward pass may need it
                self._window_tensor = torch.tensor(self.windows, device=device)
        return self._window_tensor


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The hooked attention layers of a model by module name, in layer order."""
    return {name: m for name, m in model.named_modules() if isinstance(getattr(m, "spkv", None), LayerState)}


def layer_predictor(layer: nn.Module) -> UtilityPredictor | FixedGates | None:
    """The predictor of an attention layer, or what stands in its place; None if the model's gates pass the layer by."""
    predictor = getattr(layer, "utility_predictor", None)
    assert predictor is None or isinstance(predictor, (UtilityPredictor, FixedGates))
    return predictor


def layer_state(layer: nn.Module) -> LayerState:
    """The hook state of a layer that ``attention_layers`` gave."""
    state = layer.spkv
    assert isinstance(state, LayerState)
    return state


# ---------------------------------------------------------------- what runs in a forward pass


def _pre_hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    state = layer_state(layer)
    extra: dict[str, Any] = {"spkv_state": state}
    predictor = layer_predictor(layer)
    cache = kwargs.get("past_key_values")
    if cache is not None:
        extra["spkv_cache"] = _cache_layer(cache, layer)
    if predictor is not None and (state.mode != "open" or LOCAL in predictor.row):
        if cache is not None and getattr(predictor, "mix", None) is not None:
            raise UserError("a bidirectional predictor waits for tokens to come: generate with use_cache=False")
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        logits = predictor(hidden_states, sinks=cache is None)  # with a cache, the first token is not that of the text
        if state.density_weight:
            logits = regularised(logits, state.density_weight)
        if state.windows is None:
            extra["spkv_gate"] = gate_from_logits(logits, state.mode, state.tau, state.anneal, state.p_min)
    return args, {**kwargs, **extra}


def _cache_layer(cache: Any, layer: nn.Module) -> Any:
    """The part of an ``SPKVCache`` that belongs to ``layer``."""
    index = getattr(layer, "layer_idx", None)
    if not isinstance(index, int) or index >= len(cache.layers) or not hasattr(cache.layers[index], "attend"):
        raise UserError(
            f"SP-KV attention cannot use a {type(cache).__name__}, which would keep every key: generate with "
            "past_key_values=spkv_nas.SPKVCache(model), or with use_cache=False"
        )
    return cache.layers[index]


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered as ``spkv``: q [B, Hq, T, D], k and v [B, Hkv, T, D] to ([B, T, Hq, D], None)."""
    watcher = _watchers[-1] if _watchers else None
    if watcher is not None:
        watcher.append(_Call(module, key.shape[1], kwargs))
    cache = kwargs.get("spkv_cache")
    _refuse_unsupported(query, key, value, attention_mask, dropout, kwargs)
    state = kwargs.get("spkv_state") or LayerState(key.shape[1], _native_window(kwargs))
    gate = kwargs.get("spkv_gate")
    if cache is not None:
        if gate is not None and gate.log_utility is not None:
            raise UserError('gates of training keep every key: call set_gate_mode(model, "hard") to use a cache')
        keep = gate.keep if gate else None
        cached = cache.attend(query.to(value.dtype), key.to(value.dtype), value, keep, attention_mask, scaling)
        return cached.transpose(1, 2).contiguous(), None
    if state.observer is not None:
        observed = state.observer(query, key, value, scaling or query.shape[-1] ** -0.5)
        if observed is not None:
            return observed.transpose(1, 2).to(value.dtype).contiguous(), None
    out = attention(  # under autocast the rotary embedding leaves q and k in float32; values have the matmul's dtype
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        window=_window(state, query, gate is not None),
        log_utility=gate.log_utility if gate else None,
        keep=gate.keep if gate else None,
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


def _window(state: LayerState, query: Tensor, is_gated: bool) -> int | Tensor:
    num_tokens = query.shape[2]
    if state.windows is not None:
        if len(set(state.windows)) == 1:
            return state.windows[0]
        return state.window_tensor(query.device)
    if state.gate_window is not None and is_gated:
        if state.native_window is not None and num_tokens > state.native_window:
            raise UserError(
                f"the model's own sliding window of {state.native_window} keys is shorter than the sequence of "
                f"{num_tokens} tokens, so gates beyond it would have no effect\n"
                "set sliding_window to null in the model's config, or use shorter blocks"
            )
        return state.gate_window
    return state.native_window or GLOBAL_WINDOW


def _native_window(kwargs: dict[str, Any]) -> int | None:
    window = kwargs.get("sliding_window")
    return int(window) if window is not None else None


def _refuse_unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    for keyword, what in _REFUSED_KEYWORDS.items():
        if kwargs.get(keyword) is not None:
            raise UserError(f"this model uses {what} ('{keyword}'), which SP-KV attention does not compute")
    if attention_mask is not None and (attention_mask.ndim != 2 or kwargs.get("spkv_cache") is None):
        what = "padding" if attention_mask.ndim == 2 else "an attention mask of its own"
        raise UserError(f"this batch has {what}, which SP-KV attention would ignore: give full blocks instead")
    if dropout:
        raise UserError(f"attention dropout {dropout} is not supported: set attention_dropout to 0 in the config")
    assert query.shape[2] == key.shape[2], "a cache that is not ours got past _cache_layer"
    if query.shape[3] != value.shape[3]:
        raise UserError(
            f"value heads of size {value.shape[3]} differ from query heads of size {query.shape[3]} "
            "(multi-head latent attention), which SP-KV attention does not compute"
        )


def _mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Tensor | None:
    """Which of the new tokens are no padding, bool [B, T] (None: all), for the attention function; refuses packing.

    A causal mask is the operator's own business.
    """
    if not allow_is_causal_skip:
        raise UserError(
            "this batch asks for a mask that is not causal (packed position ids?), which SP-KV attention would "
            "ignore: leave position_ids out"
        )
    if attention_mask is None:
        return None
    real = attention_mask[:, -q_length:].bool()
    return None if bool(real.all()) else real


AttentionInterface.register("spkv", _attention_function)
AttentionMaskInterface.register("spkv", _mask_function)


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("past_key_values") is not None and kwargs.get("use_cache") is False:
        raise UserError("use_cache=False with a cache would store every token twice: leave use_cache out")
    if kwargs.get("output_attentions") or getattr(model.config, "output_attentions", False):
        raise UserError("SP-KV attention computes no attention weights: leave output_attentions off")


# ---------------------------------------------------------------- finding the layers


@dataclass
class _Call:
    module: nn.Module
    num_kv_heads: int
    kwargs: dict[str, Any]


_watchers: list[list[_Call]] = []  # stack of dry runs in progress


@contextmanager
def _watch() -> Iterator[list[_Call]]:
    calls: list[_Call] = []
    _watchers.append(calls)
    try:
        yield calls
    finally:
        _watchers.pop()


@torch.no_grad()
def dry_run(model: PreTrainedModel) -> list[_Call]:
    """One forward pass of 2 tokens through ``spkv``; the calls in order.

    Raises ``UserError`` unless every one of the model's attention layers reached the function exactly once.
    """
    was_training = model.training
    model.eval()
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with _watch() as calls:
            model(input_ids=tokens, use_cache=False)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{type(model).__name__} cannot run with SP-KV attention: {error}") from error
    finally:
        model.train(was_training)
    num_layers = model.config.get_text_config().num_hidden_layers
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    expected = sum("linear" not in kind and kind != "conv" for kind in layer_types) or num_layers
    reached = len({id(call.module) for call in calls})
    if reached != expected or len(calls) != expected:
        raise UserError(
            f"{type(model).__name__}: {reached} of {expected} attention layers reached the attention function, in "
            f"{len(calls)} calls; SP-KV needs each layer exactly once\n"
            "the class does not use the attention interface of transformers, so gates would have no effect"
        )
    return calls


def _hook_layers(model: PreTrainedModel) -> None:
    """Switch ``model`` to ``spkv`` and hook its attention layers. Does nothing on a model that is hooked already."""
    if attention_layers(model):
        return
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"expected a Hugging Face PreTrainedModel, found {type(model).__name__}")
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("spkv")
        calls = dry_run(model)
    except Exception:
        model.set_attn_implementation(before)
        raise
    for call in calls:
        install(call.module, LayerState(call.num_kv_heads, _native_window(call.kwargs)))
    prepare(model, before)


def install(layer: nn.Module, state: LayerState) -> None:
    """Put the hook and its state on one attention layer."""
    layer.spkv = state  # type: ignore[assignment]  # a plain attribute, not a submodule
    layer._spkv_handle = layer.register_forward_pre_hook(_pre_hook, with_kwargs=True)  # type: ignore[assignment]


def prepare(model: PreTrainedModel, attn_implementation: str | None) -> None:
    """Model-wide part of attaching: refuse attention weights, generate without a cache, remember what was there."""
    handle = model.register_forward_pre_hook(_check_call, with_kwargs=True)
    generation = getattr(model, "generation_config", None)
    caches = (model.config.use_cache, generation.use_cache if generation else None)
    model._spkv_before = (attn_implementation, handle, caches)
    model.config.use_cache = False
    if generation:
        generation.use_cache = False


# ---------------------------------------------------------------- public


def attach_gates(model: PreTrainedModel, config: GateConfig | None = None, *, seed: int | None = None) -> None:
    """Add a utility predictor to every attention layer that sees all tokens, and gate its attention, in place.

    Layers with a sliding window of their own by design (``layer_types``) stay as they are: nothing outside their
    window is ever visible, so there is nothing to keep. Gates start in mode ``soft``, nearly open (``config.bias``).
    With ``config.heads`` only its S heads have gates; G heads see all tokens, L heads the window (paper, appendix
    "Ablating design choices", rows "3 SWA : 1 Full Attn").

    Args:
        model: any Hugging Face decoder that uses the attention interface.
        config: window, predictor, and which heads; the defaults are the paper's.
        seed: makes the predictors' initial weights repeatable; None draws from torch's global generator.

    Raises:
        UserError: the model has gates, its class or settings cannot be gated (see the module's docstring), or
            ``config.heads`` is for another number of layers or KV heads.
    """
    config = config or GateConfig()
    if any(layer_state(layer).gate_window is not None for layer in attention_layers(model).values()):
        raise UserError("this model has gates already: call detach(model) first")
    if any(layer_state(layer).windows is not None for layer in attention_layers(model).values()):
        detach(model)
    _hook_layers(model)
    layers = list(attention_layers(model).values())
    try:
        rows = gate_rows(model, config, [layer_state(layer).num_kv_heads for layer in layers])
    except UserError:
        detach(model)
        raise
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        for layer, row in zip(layers, rows, strict=True):
            if row is not None:
                install_gates(layer, row, config, model.config.get_text_config().hidden_size, model.device)
    _describe(model, gates=config.model_dump())
    dry_run(model)


def gate_rows(model: PreTrainedModel, config: GateConfig, num_kv_heads: list[int]) -> list[str | None]:
    """Letters of each attention layer's heads; None for a layer that is local by design, which gates pass by.

    Raises ``UserError`` if ``config.heads`` does not fit the model.
    """
    local = _local_by_design(model)
    if config.heads is None:
        return [None if i in local else GATED * heads for i, heads in enumerate(num_kv_heads)]
    if [len(row) for row in config.heads] != num_kv_heads:
        raise UserError(
            f"the gates' heads are for {len(config.heads)} layers x {len(config.heads[0])} KV heads, the model has "
            f"{len(num_kv_heads)} layers x {'/'.join(str(h) for h in sorted(set(num_kv_heads)))} KV heads"
        )
    wrong = [i for i in local if set(config.heads[i]) != {LOCAL}]
    if wrong:
        raise UserError(f"layer {wrong[0]} is local by design: its row of the gates' heads must be all {LOCAL}")
    return [None if i in local else row for i, row in enumerate(config.heads)]


def install_gates(
    layer: nn.Module, row: str, config: GateConfig, model_size: int, device: torch.device | None = None
) -> None:
    """Put a predictor and its settings on one hooked attention layer; fixed windows where no head of it has a gate."""
    state = layer_state(layer)
    state.gate_window, state.mode, state.tau = config.window, "soft", config.tau
    state.sinks = tuple(0 if letter == LOCAL else config.sinks for letter in row)
    if GATED in row:
        layer.utility_predictor = UtilityPredictor(model_size, row, config).to(device)
    else:
        layer.utility_predictor = FixedGates(row)
        state.windows = tuple(GLOBAL_WINDOW if letter == GLOBAL else config.window for letter in row)


def set_gate_mode(
    model: nn.Module, mode: str, tau: float | None = None, *, anneal: float = 0.0, p_min: float = 0.0
) -> None:
    """Set the mode of all gates: ``open``, ``soft``, ``sampled`` or ``hard``, as ``gate_from_logits`` says.

    Args:
        model: a model with gates.
        mode: one of "open", "soft", "sampled", "hard".
        tau: threshold in [0, 1]; None leaves it as it is.
        anneal: with "soft" or "sampled", the share ``a`` of the binary gate, ``u~ = (1 - a) u + a 1[u >= tau]``.
        p_min: with "sampled", the least probability of either outcome, in [0, 0.5].
    """
    if mode not in MODES:
        raise UserError(f"unknown gate mode '{mode}'; expected one of {', '.join(MODES)}")
    if tau is not None and not 0.0 <= tau <= 1.0:
        raise UserError(f"tau must lie in [0, 1]; found {tau}")
    gated = [layer_state(x) for x in attention_layers(model).values() if layer_state(x).gate_window is not None]
    if not gated:
        raise UserError("this model has no gates: call attach_gates(model) first")
    for state in gated:
        state.mode, state.anneal, state.p_min = mode, anneal, p_min
        state.tau = state.tau if tau is None else tau


def set_density_weight(model: nn.Module, weight: float) -> None:
    """Set lambda of the density regulariser, ``-lambda * mean(u)`` over all gated layers, heads and tokens.

    SP-KV paper, appendix "Controlling sparsity at train time", "Regularization". A negative lambda makes sparser.
    """
    layers = attention_layers(model).values()
    states = [layer_state(layer) for layer in layers if isinstance(layer_predictor(layer), UtilityPredictor)]
    for state in states:
        state.density_weight = weight / len(states)


@contextmanager
def gate_mode(model: nn.Module, mode: str, tau: float | None = None) -> Iterator[None]:
    """The gates in ``mode`` inside the ``with`` block, and as they were before after it."""
    states = [layer_state(layer) for layer in attention_layers(model).values()]
    before = [(state.mode, state.tau, state.anneal, state.p_min) for state in states]
    try:
        set_gate_mode(model, mode, tau)
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.mode, state.tau, state.anneal, state.p_min = values


def apply_layout(model: PreTrainedModel, layout: Layout, window: int | None = None) -> None:
    """Give every KV head of ``model`` the window that ``layout`` says, in place.

    A local head sees ``window`` keys (the layout's own by default), a global head all of them. Gates, if the model
    has any, are removed: a hybrid has none.

    Raises:
        UserError: the layout is for another number of layers or KV heads.
    """
    if any(layer_state(layer).gate_window is not None for layer in attention_layers(model).values()):
        detach(model)
    _hook_layers(model)
    window = window or layout.window
    try:
        windows = layout_windows(model, layout, window)
    except UserError:
        detach(model)
        raise
    for layer, row in zip(attention_layers(model).values(), windows, strict=True):
        layer_state(layer).set_windows(row)
    _describe(model, layout={"heads": list(layout.heads), "window": window})


def layout_windows(model: nn.Module, layout: Layout, window: int) -> list[tuple[int, ...]]:
    """The window of every KV head of a hooked model, by layer. Raises ``UserError`` if the layout does not fit it."""
    heads = [layer_state(layer).num_kv_heads for layer in attention_layers(model).values()]
    if heads != [layout.num_kv_heads] * layout.num_layers:
        raise UserError(
            f"the layout is for {layout.num_layers} layers x {layout.num_kv_heads} KV heads, the model has "
            f"{len(heads)} layers x {'/'.join(str(h) for h in sorted(set(heads)))} KV heads"
        )
    return [tuple(GLOBAL_WINDOW if head == GLOBAL else window for head in row) for row in layout.heads]


@contextmanager
def full_attention(model: PreTrainedModel) -> Iterator[list[LayerState]]:
    """Inside the ``with`` block every head sees all keys, whatever gates or layout it has; as before after it.

    Layers that are local by design keep their window. The model is in evaluation mode. Yields the layers' states in
    order: the block may set their windows and observers.

    Raises:
        UserError: the model cannot be hooked (see the module's docstring).
    """
    was_hooked, was_training = bool(attention_layers(model)), model.training
    _hook_layers(model)
    states = [layer_state(layer) for layer in attention_layers(model).values()]
    before = [(state.windows, state.mode) for state in states]
    model.eval()
    try:
        for state in states:
            state.mode = "open"
            state.set_windows((state.native_window or GLOBAL_WINDOW,) * state.num_kv_heads)
        yield states
    finally:
        for state, (windows, mode) in zip(states, before, strict=True):
            state.mode, state.observer = mode, None
            state.set_windows(windows)
        if not was_hooked:
            detach(model)
        model.train(was_training)


def detach(model: PreTrainedModel) -> None:
    """Remove gates, windows and hooks: the model is what it was before ``attach_gates`` or ``apply_layout``."""
    for layer in attention_layers(model).values():
        layer._spkv_handle.remove()  # type: ignore[union-attr, operator]
        del layer.spkv, layer._spkv_handle
        if hasattr(layer, "utility_predictor"):
            del layer.utility_predictor
    before = getattr(model, "_spkv_before", None)
    if before is not None:
        attn_implementation, handle, caches = before
        handle.remove()
        model.set_attn_implementation(attn_implementation or "sdpa")
        model.config.use_cache = caches[0]
        if getattr(model, "generation_config", None):
            model.generation_config.use_cache = caches[1]
        del model._spkv_before
    if hasattr(model.config, "spkv"):
        del model.config.spkv


def _local_by_design(model: PreTrainedModel) -> set[int]:
    """Indices of the attention layers that the model's ``layer_types`` call sliding."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    return {i for i, kind in enumerate(kinds) if kind == "sliding_attention"}


def _describe(model: PreTrainedModel, **section: Any) -> None:
    """Write the ``spkv`` section of the model's config: what ``load`` needs to rebuild the hooks."""
    layers = {
        name: {
            "num_kv_heads": layer_state(layer).num_kv_heads,
            "native_window": layer_state(layer).native_window,
        }
        for name, layer in attention_layers(model).items()
    }
    model.config.spkv = {"version": 1, "layers": layers, **section}
