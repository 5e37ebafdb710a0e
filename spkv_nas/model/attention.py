"""Hooks on attention layers, which compute gates and windows, and the attention function ``spkv``.

A forward pre-hook on each attention layer computes the layer's gate from the layer's (normalised) input and passes it
to the attention function as a keyword argument, which keeps ``torch.compile`` and activation checkpointing working.

Inputs for which the result would be silently wrong raise ``UserError`` (``attention_calls.py``), such as dropout,
attention masks other than those of padding and packed documents, and a cache other than ``SPKVCache``.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from spkv_kernels import attention
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from spkv_nas.artifacts import gate_config, local_layers
from spkv_nas.base.errors import UserError
from spkv_nas.model import attention_calls
from spkv_nas.model.gates import FixedGates, Gate, UtilityPredictor, gate_from_logits, priced
from spkv_nas.model.learned_sinks import chosen_sink_logits, layer_learned_sinks

GLOBAL_WINDOW = 1 << 30  # longer than any sequence


class Observer(Protocol):
    """Function of a layer's queries, keys and values that observes its attention, or replaces it.

    One with the attribute ``knows_documents`` also takes ``starts`` of packed documents, as ``spkv_kernels.attention``,
    and one with ``sees_readers`` is called for the layers that read this layer's keys, too, after this layer.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None, /
    ) -> Tensor | None:
        """Return the attention output [B, Hq, T, D] of a pass, or None to leave it to the model.

        Args:
            q: [B, Hq, T, D].
            k: [B, Hkv, T, D].
            v: [B, Hkv, T, D].
            scale: scale of the scores, which ``LayerState.softcap`` caps.
            sink_logits: learned sinks [Hq] of the model, or None; ``refuse_learned_sinks`` where they are not computed.
        """


@dataclass
class GateSettings:
    """Current mode of a model's gates: one object shared by all layers, changed by ``spkv_nas.model.modes``."""

    mode: str = "soft"  # "open", "soft", "sampled" or "hard" (gates.gate_from_logits)
    tau: float = 0.5  # threshold of the utility, in [0, 1]
    anneal: float = 0.0  # weight a of the binary gate, in [0, 1]
    p_min: float = 0.0  # minimum probability of either outcome of a sampled gate, in [0, 0.5]
    # Weight of each layer's mean utility in the loss, float32 [] on any device
    price: Tensor | float | None = None


@dataclass
class LayerState:
    """State of the hook of one attention layer, stored on the layer so that copies of the model keep it."""

    num_kv_heads: int  # KV heads of the layer
    native_window: (
        int | None
    )  # sliding window of this layer in the checkpoint; None: full attention
    # gate settings of the model, the same object in all of its layers
    settings: GateSettings = field(default_factory=GateSettings)
    # window of each KV head, from a layout, or for a layer without gated heads; None: gates decide
    windows: tuple[int, ...] | None = None
    gate_window: int | None = None  # window w of the gates, in keys; None: no gates
    # number of first tokens that each KV head sees besides its window, from a layout or of gates; empty: 0
    sinks: tuple[int, ...] = ()
    # whether the layer's learned sinks act, which belong to the layout that they were added to
    learned_sinks: bool = False
    observer: Observer | None = None  # called with each pass's queries, keys and values
    num_readers: int = 0  # later layers without keys of their own, which read this layer's keys and share this state
    softcap: float | None = None  # cap of the scores in the pass that ``observer`` sees
    # Whether all heads keep the native window in every layout (local_layers.py)
    is_always_local: bool = False
    # channels of a head in the cache, the most of its keys and values; 0 before a dry run
    head_dim: int = 0
    # Channels of a head, if all are expanded from a latent, which is one KV head; 0: none is
    expanded_dim: int = 0
    _tensors: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Remember the window that the layer asks for, even if ``native_window`` is changed to replace it."""
        self.requested_window = self.native_window

    @property
    def checkpoint_window(self) -> int:
        """Return how many recent keys a head of this layer sees in the checkpoint, without gates and layouts."""
        return self.native_window or GLOBAL_WINDOW

    def set_windows(self, windows: tuple[int, ...], sinks: int = 0) -> None:
        """Set the window of each KV head, and let local heads also see the first ``sinks`` tokens.

        Heads with the window of the checkpoint get no sink tokens (``takes_sinks``). Learned sinks cease to act.
        """
        self.windows = windows
        self.learned_sinks = False
        self.sinks = tuple(
            sinks if local_layers.takes_sinks(self, window) else 0 for window in windows
        )

    def head_windows(self, *, gated: bool) -> tuple[int, ...]:
        """Return the window of each KV head: how many recent keys it always sees.

        With ``gated`` it is that of the gates, which decide about the keys beyond it, where no layout sets windows.
        """
        if self.windows is not None:
            return self.windows
        window = (
            self.gate_window if gated and self.gate_window is not None else self.checkpoint_window
        )
        return (window,) * self.num_kv_heads

    def operator_window(
        self, device: torch.device, *, gated: bool
    ) -> int | tuple[int, ...] | Tensor:
        """Return ``head_windows`` as the attention operator takes them: an int, or one per KV head.

        On a GPU they are a tensor [Hkv], cached as long as the windows stay the same, because copying synchronises.
        """
        return self._by_head(self.head_windows(gated=gated), device)

    @property
    def local_sinks(self) -> int:
        """Return a layout's sink tokens of local heads; 0 where gates decide, which keep their own (``gates``)."""
        return max([0, *self._layout_sinks()])

    def operator_sinks(self, device: torch.device) -> int | tuple[int, ...] | Tensor:
        """Return the sink tokens of a layout as the attention operator takes them, like ``operator_window``.

        They are one int unless a layer has heads with its native window, because heads that see all keys also see the
        first ones.
        """
        return (
            self.local_sinks
            if self.native_window is None
            else self._by_head(self._layout_sinks(), device)
        )

    def _layout_sinks(self) -> tuple[int, ...]:
        """Return the sink tokens of each KV head whose window a layout limits; empty where gates decide."""
        pairs = zip(self.sinks, self.windows or (), strict=False)
        return tuple(
            sinks if local_layers.takes_sinks(self, window) else 0 for sinks, window in pairs
        )

    def _by_head(
        self, values: tuple[int, ...], device: torch.device
    ) -> int | tuple[int, ...] | Tensor:
        """Return one int if all KV heads have the same, else ``values``, on a GPU as a tensor; 0 if there are none."""
        if len(set(values)) <= 1:
            return values[0] if values else 0
        if device.type == "cpu":  # constant to torch.compile
            return values
        # Create the tensor once per device
        key = (values, device)
        if key not in self._tensors:
            with torch.inference_mode(False):  # a later backward pass may save it
                self._tensors = dict(
                    list(self._tensors.items())[-1:]
                )  # windows and sinks take turns
                self._tensors[key] = torch.tensor(values, device=device)
        return self._tensors[key]

    def check_gate_reach(self, num_tokens: int) -> None:
        """Raise ``UserError`` if gates would decide about keys that the checkpoint's own sliding window hides."""
        if (
            self.windows is None
            and self.native_window is not None
            and num_tokens > self.native_window
        ):
            raise UserError(
                f"the model's own sliding window of {self.native_window} keys is shorter than the sequence of "
                f"{num_tokens} tokens, so gates beyond it would have no effect\n"
                "set sliding_window to null in the model's config, or use shorter blocks"
            )


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the hooked attention layers with keys of their own by module name, in layer order."""
    return {
        name: layer for name, layer in hooked_layers(model).items() if layer_source(layer) is layer
    }


def hooked_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the ``attention_layers`` of a model, and those that read their keys."""
    return {
        name: m for name, m in model.named_modules() if isinstance(vars(m).get("spkv"), LayerState)
    }


def layer_source(layer: nn.Module) -> nn.Module:
    """Return the layer whose keys a hooked layer reads: itself, unless the model shares keys among layers."""
    (source,) = getattr(layer, "spkv_source", (layer,))
    assert isinstance(source, nn.Module)
    return source


def layer_state(layer: nn.Module) -> LayerState:
    """Return the hook state of a hooked attention layer."""
    state = layer.spkv
    assert isinstance(state, LayerState)
    return state


def layer_states(model: nn.Module) -> list[LayerState]:
    """Return the hook states of a model's attention layers, in layer order."""
    return [layer_state(layer) for layer in attention_layers(model).values()]


def heads_per_layer(states: Sequence[LayerState]) -> tuple[int, ...]:
    """Return the number of KV heads of every hooked layer."""
    return tuple(state.num_kv_heads for state in states)


def layer_predictor(layer: nn.Module) -> UtilityPredictor | FixedGates | None:
    """Return the utility predictor of an attention layer, or its fixed gates; None if the layer is not gated."""
    predictor = getattr(layer, "utility_predictor", None)
    assert predictor is None or isinstance(predictor, (UtilityPredictor, FixedGates))
    return predictor


LogitsObserver = Callable[
    [int, Tensor, Tensor], None
]  # gets a layer's index, logits and text tokens


def watch_logits(model: nn.Module, see: LogitsObserver) -> ExitStack:
    """Call ``see(layer, logits [B, Hkv, T], is_text)`` each time that the gates of an attention layer run.

    ``is_text`` bool [B, T] is false for padding and filling. Layers are numbered from 0, including those without gates.
    Recomputation in a backward pass (activation checkpointing) is not reported again. Leave the ``with`` block or call
    ``close()`` to remove the hooks.
    """
    stack = ExitStack()
    for index, layer in enumerate(attention_layers(model).values()):
        predictor = layer_predictor(layer)
        if predictor is not None:
            stack.callback(
                predictor.register_forward_hook(_hook(index, see), with_kwargs=True).remove
            )
    return stack


def _hook(
    layer: int, see: LogitsObserver
) -> Callable[[nn.Module, Any, dict[str, Any], Tensor], None]:
    """Make the forward hook of a predictor."""

    def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any], logits: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs
            see(layer, logits, kwargs["is_text"])

    return hook


def install(layer: nn.Module, state: LayerState, source: nn.Module | None = None) -> None:
    """Attach the hook and its state to one attention layer; ``source``: the layer whose keys and state it shares."""
    layer.spkv = state  # type: ignore[assignment]  # a plain attribute, not a submodule
    if source is not None and source is not layer:
        layer.spkv_source = (source,)  # type: ignore[assignment]  # in a tuple, or else it would be a submodule
    layer._spkv_handle = layer.register_forward_pre_hook(_pre_hook, with_kwargs=True)  # type: ignore[assignment]


def uninstall(layer: nn.Module) -> None:
    """Remove the hook, its state and the predictor from a layer."""
    layer._spkv_handle.remove()  # type: ignore[union-attr, operator]
    del layer.spkv, layer._spkv_handle
    vars(layer).pop("spkv_source", None)
    for name in added_modules(layer):
        delattr(layer, name)


def added_modules(layer: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules that this package added to a layer, by name: its predictor, and learned sinks."""
    return {
        name: layer._modules[name]
        for name in ("utility_predictor", "learned_sinks")
        if name in layer._modules
    }


def _pre_hook(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Add the layer's state, its part of the cache, and its gate to the keyword arguments of an attention layer."""
    state = layer_state(layer)
    source = layer_source(layer)
    settings = state.settings
    extra: dict[str, Any] = {
        "spkv_state": state,
        "spkv_reads": True if source is not layer else None,
    }
    predictor = layer_predictor(layer)
    # Pass on the layer's part of the cache
    cache = kwargs.get("past_key_values")
    if cache is None:
        cache = kwargs.get("layer_past")  # its name in GPT-NeoX and others
    if cache is not None:
        # Layers that share their weights, as in Zamba, are told their index
        cache_layer = _cache_layer(
            cache, kwargs.get("layer_idx", getattr(source, "layer_idx", None))
        )
        if source is layer:
            cache_layer.expect_update()
        extra["spkv_cache"] = cache_layer
    # Compute the gate; in open mode it only closes local heads
    if predictor is not None and (settings.mode != "open" or gate_config.LOCAL in predictor.row):
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        starts = None
        # With a cache, token 0 need not be the first of the text
        if cache is None:
            extra["spkv_starts"] = starts = attention_calls.document_starts(
                mask, kwargs, hidden_states
            )
        is_text = attention_calls.text_tokens(mask, starts, hidden_states)
        logits = predictor(hidden_states, sinks=cache is None, starts=starts, is_text=is_text)
        if settings.price is not None and isinstance(predictor, UtilityPredictor):
            logits = priced(logits, settings.price, is_text)
        # Let windows override the gate
        if state.windows is None:
            extra["spkv_gate"] = gate_from_logits(
                logits, settings.mode, settings.tau, settings.anneal, settings.p_min
            )
    if state.learned_sinks and (learned_sinks := layer_learned_sinks(layer)) is not None:
        extra["spkv_sink_logits"] = learned_sinks()
    return args, {**kwargs, **extra}


def _cache_layer(cache: Any, index: int | None) -> Any:
    """Return layer ``index`` of an ``SPKVCache``. Raises ``UserError`` for any other cache."""
    layers = getattr(cache, "layers", ())
    if not isinstance(index, int) or index >= len(layers) or not hasattr(layers[index], "attend"):
        raise cache_error(cache)
    return layers[index]


def cache_error(cache: Any) -> UserError:
    """Make the error for a cache that is no ``SPKVCache``."""
    return UserError(
        f"SP-KV attention cannot use a {type(cache).__name__}, which would store every key: generate with "
        "past_key_values=spkv_nas.SPKVCache(model), or with use_cache=False; prefix tuning is not supported"
    )


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
    """Compute attention under the gates and windows of the calling layer; registered as ``spkv``.

    From q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] and what ``padding_mask`` made of the batch's mask,
    returns [B, T, Hq, Dv]. Where values have another size, as in multi-head latent attention, the smaller heads get
    zero channels up to the larger size, also in the cache.
    """
    # Record and check the call
    attention_calls.record_call(module, key, value, attention_calls.requested_window(kwargs))
    cache = kwargs.get("spkv_cache")
    attention_calls.refuse_keywords(module, kwargs)
    attention_calls.refuse_tensors(query, key, value, attention_mask, dropout, cache)
    state = _call_state(key.shape[1], kwargs)
    # Attend with queries, keys and values of one size
    scaling, value_size = scaling or query.shape[-1] ** -0.5, value.shape[-1]
    q, k, v = attention_calls.one_head_size(query, key, value)
    if state.num_readers and state.gate_window is not None:
        kwargs = attention_calls.with_shared_gate(key, kwargs)
    out = _attend(state, q, k, v, attention_mask, scaling, kwargs)
    return out[..., :value_size].transpose(1, 2).to(value.dtype).contiguous(), None


def _attend(
    state: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Compute the output [B, Hq, T, D] of a checked call, over the cache or by an observer if there is one."""
    gate: Gate | None = kwargs.get("spkv_gate")
    is_reader = bool(kwargs.get("spkv_reads"))
    sink_logits = chosen_sink_logits(kwargs.get("s_aux"), kwargs.get("spkv_sink_logits"))
    if kwargs.get("spkv_cache") is not None:
        return _attend_over_cache(state, q, k, v, mask, scale, sink_logits, kwargs)
    # Find the documents of each row, which the pre-hook passed to the gates
    starts = attention_calls.document_starts(mask, kwargs, q)
    if (
        gate is not None
        and starts is not None
        and not is_reader
        and kwargs.get("spkv_starts") is None
    ):
        raise UserError(
            "this model's layers get their attention mask by position, so gates cannot tell documents"
        )
    softcap = kwargs.get("softcap")
    observer = state.observer
    if observer is not None and (not is_reader or getattr(observer, "sees_readers", False)):
        if softcap is not None:
            state.softcap = softcap
        observed = _observe(observer, q, k, v, scale, sink_logits, starts)
        if observed is not None:
            return observed
    # Attend within the sequence
    if gate is not None:
        state.check_gate_reach(q.shape[2])
    if q.is_meta:  # only shapes are needed
        return q
    if gate is not None:
        gate = gate.of_heads(k.shape[1])
    # Under autocast RoPE returns q and k in float32; v has the dtype of the matmul
    return attention(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        window=state.operator_window(q.device, gated=gate is not None),
        sinks=state.operator_sinks(q.device),
        sink_logits=sink_logits,
        log_utility=gate.log_utility if gate else None,
        keep=gate.keep if gate else None,
        starts=starts,
        scale=scale,
        softcap=softcap,
    )


def _attend_over_cache(
    state: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    sink_logits: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Compute the output [B, Hq, T, D] of a call over the layer's part of the cache, which stores what gates keep."""
    gate: Gate | None = kwargs.get("spkv_gate")
    cache = kwargs["spkv_cache"]
    if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None:
        raise UserError(
            "a cache holds no packed documents (cu_seq_lens_q, seq_idx): give use_cache=False"
        )
    if gate is not None and gate.log_utility is not None:
        raise UserError(
            'soft and sampled gates keep every key: call set_gate_mode(model, "hard") to use a cache, or the model '
            "with use_cache=False"
        )
    if state.gate_window is not None:
        state.check_gate_reach(cache.get_seq_length() + q.shape[2])
    out: Tensor = cache.attend(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        gate.keep if gate else None,
        mask,
        scale,
        sink_logits,
        kwargs.get("softcap"),
        is_reader=bool(kwargs.get("spkv_reads")),
    )
    return out


def _observe(
    observer: Observer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sink_logits: Tensor | None,
    starts: Tensor | None,
) -> Tensor | None:
    """Let an observer measure attention, or replace it by the output [B, Hq, T, D] that it returns."""
    if starts is None:
        return observer(q, k, v, scale, sink_logits)
    if not getattr(observer, "knows_documents", False):
        raise UserError(
            "this measurement of attention does not support separate documents: give joined ones"
        )
    return observer(q, k, v, scale, sink_logits, starts=starts)  # type: ignore[call-arg]


def _call_state(num_kv_heads: int, kwargs: dict[str, Any]) -> LayerState:
    """Return the state of the calling layer. Raises ``UserError`` if the layer's sliding window is another one now."""
    window = attention_calls.requested_window(kwargs)
    state: LayerState = kwargs.get("spkv_state") or LayerState(num_kv_heads, window)
    if state.requested_window != window:
        raise UserError(
            f"the sliding window of a layer was changed from {state.requested_window} to {window} after the model was "
            "hooked: call detach(model), and add gates or layout again"
        )
    return state


AttentionInterface.register("spkv", _attention_function)
AttentionMaskInterface.register("spkv", attention_calls.padding_mask)
