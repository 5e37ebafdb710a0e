"""Hooks on attention layers, which compute gates and windows, and the attention function ``spkv``.

A forward pre-hook on each attention layer computes the layer's gate from the layer's (normalised) input and passes it
to the attention function as a keyword argument, which keeps ``torch.compile`` and activation checkpointing working.

Inputs for which the result would be silently wrong raise ``UserError`` (``attention_calls.py``), such as dropout,
attention masks other than those of padding and packed documents, and a cache other than ``SPKVCache``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from spkv_kernels import attention
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from spkv_nas.artifacts import gate_config, local_layers
from spkv_nas.base.errors import UserError
from spkv_nas.model import attention_calls
from spkv_nas.model.attention_calls import Keywords
from spkv_nas.model.gates import FixedGates, Gate, UtilityPredictor, gate_from_logits, priced
from spkv_nas.model.learned_sinks import chosen_sink_logits, layer_learned_sinks

GLOBAL_WINDOW = 1 << 30  # longer than any sequence

# Function that gets a layer's index, its logits [B, Hkv, T], and which tokens are text, bool [B, T]
LogitsObserver = Callable[[int, Tensor, Tensor], None]


class Observer(ABC):
    """Object that observes the attention of a layer, or replaces it.

    A plain function ``observer(q, k, v, scale, sink_logits)`` does the same for texts that are one document.
    """

    # Whether it is also called for the layers that read this layer's keys, after this layer
    sees_readers: ClassVar[bool] = False
    # Whether it takes ``starts``; otherwise packed documents are refused
    knows_documents: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None,
        starts: Tensor | None = None,
    ) -> Tensor | None:
        """Return the attention output [B, Hq, T, D] of a pass, or None to leave it to the model.

        Args:
            q: [B, Hq, T, D].
            k: [B, Hkv, T, D].
            v: [B, Hkv, T, D].
            scale: scale of the scores, which ``LayerState.softcap`` caps.
            sink_logits: learned sinks [Hq] of the model, or None; ``refuse_learned_sinks`` where they are not computed.
            starts: where the document of each token starts, int [B, T]; None: each row is one document.
        """


ObserverFunction = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor | None]


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
    # Sliding window of this layer in the checkpoint; None: full attention
    native_window: int | None
    # Gate settings of the model, the same object in all of its layers
    settings: GateSettings = field(default_factory=GateSettings)
    # Window of each KV head, from a layout, or for a layer without gated heads; None: gates decide
    windows: tuple[int, ...] | None = None
    gate_window: int | None = None  # window w of the gates, in keys; None: no gates
    # Number of first tokens that each KV head sees besides its window, from a layout or of gates; empty: 0
    sinks: tuple[int, ...] = ()
    # Whether the layer's learned sinks act, which belong to the layout that they were added to
    learned_sinks: bool = False
    # Called with each pass's queries, keys and values
    observer: Observer | ObserverFunction | None = None
    num_readers: int = 0  # later layers without keys of their own, which read this layer's keys and share this state
    softcap: float | None = None  # cap of the scores in the pass that ``observer`` sees
    # Whether all heads keep the native window in every layout (local_layers.py)
    is_always_local: bool = False
    # Channels of a head in the cache, the most of its keys and values; 0 before a dry run
    head_dim: int = 0
    # Channels of a head, if all are expanded from a latent, which is one KV head; 0: none is
    expanded_dim: int = 0
    # Values of heads on a GPU, by (values, device)
    _tensors: dict[tuple[tuple[int, ...], torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        window = self.checkpoint_window
        if gated and self.gate_window is not None:
            window = self.gate_window
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
        if self.native_window is None:
            return self.local_sinks
        return self._by_head(self._layout_sinks(), device)

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
            # Keep the latest one, because windows and sinks take turns
            self._tensors = dict(list(self._tensors.items())[-1:])
            with torch.inference_mode(False):  # a later backward pass may save it
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
                f"the model's own sliding window of {self.native_window} keys is shorter than the "
                f"sequence of {num_tokens} tokens, so gates beyond it would have no effect\n"
                "set sliding_window to null in the model's config, or use shorter blocks"
            )


class CacheLayer(Protocol):
    """Part of an ``SPKVCache`` that belongs to one attention layer: ``layer_cache.SPKVCacheLayer``."""

    def expect_update(self) -> None:
        """Allow one ``update``."""

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        mask: Tensor | None,
        scale: float | None,
        sink_logits: Tensor | None = None,
        softcap: float | None = None,
        *,
        is_reader: bool = False,
    ) -> Tensor:
        """Compute attention of new tokens over the cache and each other, then store their keys and values."""


@dataclass(frozen=True)
class AttentionCall:
    """Hold what attention depends on besides queries, keys and values; the pre-hook passes it on."""

    state: LayerState  # state of the layer, or of the layer whose keys it reads
    is_reader: bool = False  # whether it reads the keys of another layer
    cache: CacheLayer | None = None  # the layer's part of the cache
    gate: Gate | None = None  # gate of the new keys; None: none decides
    starts: Tensor | None = None  # where the documents start that the gate knows, int [B, T]
    sink_logits: Tensor | None = None  # learned sinks, [Hq]
    softcap: float | None = None  # cap of the scores


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the hooked attention layers with keys of their own by module name, in layer order."""
    return {
        name: layer for name, layer in hooked_layers(model).items() if layer_source(layer) is layer
    }


def hooked_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the ``attention_layers`` of a model, and those that read their keys."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(vars(module).get("spkv"), LayerState)
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
            handle = predictor.register_forward_hook(_hook(index, see), with_kwargs=True)
            stack.callback(handle.remove)
    return stack


def _hook(layer: int, see: LogitsObserver) -> Callable[..., None]:
    """Make the forward hook of a predictor."""

    def hook(
        _predictor: nn.Module, _args: tuple[object, ...], kwargs: Keywords, logits: Tensor
    ) -> None:
        is_in_backward = torch._C._current_graph_task_id() != -1
        if not is_in_backward:
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
    layer: nn.Module, args: tuple[Any, ...], kwargs: Keywords
) -> tuple[tuple[Any, ...], Keywords]:
    """Add an ``AttentionCall`` with the layer's state, cache, gate and learned sinks to its keyword arguments."""
    state = layer_state(layer)
    cache = _cache_layer(layer, kwargs)
    predictor = layer_predictor(layer)
    gate = None
    starts = None
    # In open mode the gate only closes local heads
    if predictor is not None and (
        state.settings.mode != "open" or gate_config.LOCAL in predictor.row
    ):
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        # With a cache, token 0 need not be the first of the text
        if cache is None:
            mask = kwargs.get("attention_mask")
            starts = attention_calls.document_starts(mask, kwargs, hidden_states)
        gate = _compute_gate(predictor, state, hidden_states, starts, cache is None, kwargs)
    learned_sinks = layer_learned_sinks(layer) if state.learned_sinks else None
    call = AttentionCall(
        state=state,
        is_reader=layer_source(layer) is not layer,
        cache=cache,
        gate=gate,
        starts=starts,
        sink_logits=None if learned_sinks is None else learned_sinks(),
    )
    return args, {**kwargs, attention_calls.CALL_KEYWORD: call}


def _cache_layer(layer: nn.Module, kwargs: Keywords) -> CacheLayer | None:
    """Return the part of an ``SPKVCache`` that belongs to a layer, or to the layer whose keys it reads.

    None if the call has no cache. Raises ``UserError`` for any other cache.
    """
    cache = kwargs.get("past_key_values")
    if cache is None:
        cache = kwargs.get("layer_past")  # its name in GPT-NeoX and others
    if cache is None:
        return None
    # Layers that share their weights, as in Zamba, are told their index
    source = layer_source(layer)
    index = kwargs.get("layer_idx", getattr(source, "layer_idx", None))
    layers = getattr(cache, "layers", ())
    if not isinstance(index, int) or index >= len(layers) or not hasattr(layers[index], "attend"):
        raise cache_error(cache)
    cache_layer: CacheLayer = layers[index]
    if source is layer:
        cache_layer.expect_update()
    return cache_layer


def _compute_gate(
    predictor: UtilityPredictor | FixedGates,
    state: LayerState,
    hidden_states: Tensor,
    starts: Tensor | None,
    begins_text: bool,
    kwargs: Keywords,
) -> Gate | None:
    """Compute the gate of a layer from its input [B, T, C]; None where windows override it.

    Documents begin at ``starts`` [B, T], and the text at the first token if ``begins_text``.
    """
    settings = state.settings
    is_text = attention_calls.text_tokens(kwargs.get("attention_mask"), starts, hidden_states)
    logits = predictor(hidden_states, sinks=begins_text, starts=starts, is_text=is_text)
    if settings.price is not None and isinstance(predictor, UtilityPredictor):
        logits = priced(logits, settings.price, is_text)
    if state.windows is not None:
        return None
    return gate_from_logits(logits, settings.mode, settings.tau, settings.anneal, settings.p_min)


def cache_error(cache: object) -> UserError:
    """Make the error for a cache that is no ``SPKVCache``."""
    return UserError(
        f"SP-KV attention cannot use a {type(cache).__name__}, which would store every key: "
        "generate with past_key_values=spkv_nas.SPKVCache(model), or with use_cache=False; "
        "prefix tuning is not supported"
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
    window = attention_calls.requested_window(kwargs)
    attention_calls.record_call(module, key, value, window)
    call: AttentionCall | None = kwargs.get(attention_calls.CALL_KEYWORD)
    if call is None:  # the layer is not hooked yet
        call = AttentionCall(LayerState(key.shape[1], window))
    attention_calls.refuse_keywords(module, kwargs)
    attention_calls.refuse_tensors(query, key, value, attention_mask, dropout, call.cache)
    _check_window(call.state, window)
    # Attend with queries, keys and values of one size
    scale = scaling or query.shape[-1] ** -0.5
    q, k, v = attention_calls.one_head_size(query, key, value)
    call = _complete_call(call, key, kwargs)
    if call.cache is not None:
        out = _attend_over_cache(call, call.cache, q, k, v, attention_mask, scale, kwargs)
    else:
        starts = attention_calls.document_starts(attention_mask, kwargs, q)
        _check_gate_documents(call, starts)
        observed = _observe(call, q, k, v, scale, starts)
        out = _attend(call, q, k, v, scale, starts) if observed is None else observed
    return out[..., : value.shape[-1]].transpose(1, 2).to(value.dtype).contiguous(), None


def _check_window(state: LayerState, window: int | None) -> None:
    """Raise ``UserError`` if the sliding window of a layer is another one than when it was hooked."""
    if state.requested_window != window:
        raise UserError(
            f"the sliding window of a layer was changed from {state.requested_window} to {window} "
            "after the model was hooked: call detach(model), and add gates or layout again"
        )


def _complete_call(call: AttentionCall, key: Tensor, kwargs: Keywords) -> AttentionCall:
    """Add what the layer itself passes, and the gate that readers of ``key`` [B, Hkv, T, D] share with its layer."""
    gate = call.gate
    if call.state.num_readers and call.state.gate_window is not None:
        gate = attention_calls.shared_gate(key, gate, is_reader=call.is_reader)
    return AttentionCall(
        state=call.state,
        is_reader=call.is_reader,
        cache=call.cache,
        gate=gate,
        starts=call.starts,
        sink_logits=chosen_sink_logits(kwargs.get("s_aux"), call.sink_logits),
        softcap=kwargs.get("softcap"),
    )


def _attend_over_cache(
    call: AttentionCall,
    cache: CacheLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    kwargs: Keywords,
) -> Tensor:
    """Attend over the layer's part of the cache, which stores what gates keep; return [B, Hq, T, D]."""
    if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None:
        raise UserError(
            "a cache holds no packed documents (cu_seq_lens_q, seq_idx): give use_cache=False"
        )
    if call.gate is not None and call.gate.log_utility is not None:
        raise UserError(
            'soft and sampled gates keep every key: call set_gate_mode(model, "hard") to use a'
            " cache, or the model with use_cache=False"
        )
    if call.state.gate_window is not None:
        call.state.check_gate_reach(cache.get_seq_length() + q.shape[2])
    return cache.attend(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        call.gate.keep if call.gate else None,
        mask,
        scale,
        call.sink_logits,
        call.softcap,
        is_reader=call.is_reader,
    )


def _check_gate_documents(call: AttentionCall, starts: Tensor | None) -> None:
    """Raise ``UserError`` if the gate of a layer does not know of the documents that start at ``starts`` [B, T]."""
    has_own_gate = call.gate is not None and not call.is_reader
    if has_own_gate and starts is not None and call.starts is None:
        raise UserError(
            "this model's layers get their attention mask by position, "
            "so gates cannot tell documents"
        )


def _observe(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float, starts: Tensor | None
) -> Tensor | None:
    """Let the observer of a layer, if it has one, measure attention, or replace it by the output that it returns."""
    observer = call.state.observer
    if observer is None:
        return None
    if call.is_reader and not (isinstance(observer, Observer) and observer.sees_readers):
        return None
    if call.softcap is not None:
        call.state.softcap = call.softcap
    if starts is None:
        return observer(q, k, v, scale, call.sink_logits)
    if not (isinstance(observer, Observer) and observer.knows_documents):
        raise UserError(
            "this measurement of attention does not support separate documents: give joined ones"
        )
    return observer(q, k, v, scale, call.sink_logits, starts=starts)


def _attend(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float, starts: Tensor | None
) -> Tensor:
    """Attend within the sequence, or its documents that start at ``starts`` [B, T]; return [B, Hq, T, D]."""
    state = call.state
    if call.gate is not None:
        state.check_gate_reach(q.shape[2])
    if q.is_meta:  # only shapes are needed
        return q
    gate = None if call.gate is None else call.gate.of_heads(k.shape[1])
    # Under autocast RoPE returns q and k in float32; v has the dtype of the matmul
    return attention(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        window=state.operator_window(q.device, gated=gate is not None),
        sinks=state.operator_sinks(q.device),
        sink_logits=call.sink_logits,
        log_utility=gate.log_utility if gate else None,
        keep=gate.keep if gate else None,
        starts=starts,
        scale=scale,
        softcap=call.softcap,
    )


AttentionInterface.register("spkv", _attention_function)
AttentionMaskInterface.register("spkv", attention_calls.padding_mask)
