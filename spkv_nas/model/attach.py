"""Attach gates to any Hugging Face decoder that uses the attention interface, and detach them.

Attention layers are found by recording which modules call the attention function; each gets a forward pre-hook.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from spkv_nas.artifacts import grid, local_layers
from spkv_nas.artifacts.gate_config import GATED, GLOBAL, LOCAL, GateConfig
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.memory import is_short_of_memory
from spkv_nas.model import (
    attention,
    attention_calls,
    call_inputs,
    config_section,
    gates,
    layer_cache,
    layer_places,
    modes,
    placement,
)
from spkv_nas.model.attention_calls import Keywords
from spkv_nas.model.cache_layers import attention_indices, cache_layers
from spkv_nas.model.generation_cache import SPKVCache, check_states
from spkv_nas.model.snapshot import Snapshot, unchanged_on_failure


@unchanged_on_failure
def attach_gates(
    model: PreTrainedModel, config: GateConfig | None = None, *, seed: int | None = None
) -> None:
    """Add a utility predictor to every attention layer that sees all tokens, and gate its attention, in place.

    Layers with a native sliding window (``layer_types``) are not gated: nothing outside their window is ever visible,
    so there are no keys to select. Layers that read another's keys follow its gates. Gates start in mode ``soft``,
    nearly open (``config.bias``). With ``config.heads`` only S heads have gates; G heads see all tokens, L heads only
    the window (SP-KV paper, appendix "Ablating design choices", rows "3 SWA : 1 Full Attn").

    Args:
        model: any Hugging Face decoder that uses the attention interface.
        config: window, predictor, and gated heads; the defaults are the paper's.
        seed: seed of the predictors' initial weights; None draws from torch's global generator.

    Raises ``UserError``: the model already has gates, its class or settings cannot be gated (see ``attention.py``), or
    ``config.heads`` is for another number of layers or KV heads.
    """
    # Hook the layers
    config = config or GateConfig()
    if any(state.gate_window is not None for state in attention.layer_states(model)):
        raise UserError("this model already has gates: call detach(model) first")
    if any(state.windows is not None for state in attention.layer_states(model)):
        detach(model)
    hook_layers(model)
    # Check the heads against the model
    layers = list(attention.attention_layers(model).values())
    rows = gate_rows(model, config)
    # Attach a predictor to each gated layer
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        for layer, row in zip(layers, rows, strict=True):
            if row is not None:
                device = placement.layer_device(layer)  # layers may be on different devices
                install_gates(
                    layer, row, config, model.config.get_text_config().hidden_size, device
                )
    config_section.write_section(model, config)
    dry_run(model)


def detach(model: PreTrainedModel) -> None:
    """Remove gates, windows and hooks, which restores the model as before ``attach_gates`` or ``apply_layout``."""
    for layer in attention.hooked_layers(model).values():
        attention.uninstall(layer)
    # Restore the settings from before the hooks
    before = getattr(model, "_spkv_before", None)
    if before is not None:
        attn_implementation, handles, use_cache = before
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(attn_implementation or "sdpa")
        model.config.get_text_config().use_cache = use_cache
        del (
            model._prepare_cache_for_generation,
            model._spkv_before,
            model._spkv_states,
            model._spkv_shares_keys,
        )
    config_section.remove_section(model)


@contextmanager
def restored(model: PreTrainedModel) -> Iterator[None]:
    """Restore gates, layout and hooks after the ``with`` block, whatever the block does to them."""
    # Remember hooks, gates, learned sinks and settings
    before = Snapshot(model)
    layers = []
    for layer in attention.hooked_layers(model).values():
        state = attention.layer_state(layer)
        source = attention.layer_source(layer)
        layers.append((layer, state, dict(vars(state)), attention.added_modules(layer), source))
    attn_implementation, _, use_cache = getattr(model, "_spkv_before", (None, None, None))
    section = getattr(model.config, "spkv", None)
    try:
        yield
    finally:
        try:
            detach(model)
            # Restore them
            for layer, state, values, added, source in layers:
                vars(state).update(values)
                attention.install(layer, state, source)
                layer._modules.update(added)
            if layers:
                model.set_attn_implementation("spkv")
                prepare(model, attn_implementation, use_cache)
            if section is not None:
                config_section.restore_section(model, section)
        except BaseException:
            before.restore()
            raise


@contextmanager
def detached(model: PreTrainedModel) -> Iterator[None]:
    """Remove gates, windows and hooks inside the ``with`` block, and restore the same ones after it."""
    with restored(model):
        detach(model)
        yield


def check_rows(what: str, heads_per_layer: Sequence[int], model: torch.nn.Module) -> None:
    """Raise ``UserError`` unless ``what``, such as "the layout", has as many letters by layer as a hooked model."""
    states = attention.layer_states(model)
    is_latent = any(state.expanded_dim for state in states)
    remedy = (
        "the heads of a layer share one latent, so give one letter per layer" if is_latent else ""
    )
    grid.check_grid(what, heads_per_layer, "the model", attention.heads_per_layer(states), remedy)


def gate_rows(model: PreTrainedModel, config: GateConfig) -> list[str | None]:
    """Return the head letters (S, G or L) of each hooked layer; None for a layer that is local by design.

    Raises ``UserError`` if ``config.heads`` does not fit the model.
    """
    states = attention.layer_states(model)
    if config.heads is None:
        configured = [GATED * state.num_kv_heads for state in states]
    else:
        configured = list(config.heads)
        check_rows("the grid of the gates' heads", [*map(len, configured)], model)
    rows: list[str | None] = []
    for index, (state, row) in enumerate(zip(states, configured, strict=True)):
        if config.heads is not None and state.is_always_local and set(row) != {LOCAL}:
            raise UserError(
                f"layer {index} has a native sliding window: its row in the gates' heads must be "
                f"all {LOCAL}"
            )
        rows.append(None if state.is_always_local else row)
    return rows


def install_gates(
    layer: torch.nn.Module,
    row: str,
    config: GateConfig,
    model_size: int,
    device: torch.device | None = None,
) -> None:
    """Attach a predictor and gate settings to one hooked layer, or fixed windows if none of its heads is gated."""
    state = attention.layer_state(layer)
    state.gate_window = config.window
    state.settings.tau = config.tau
    state.sinks = tuple(0 if letter == LOCAL else config.sinks for letter in row)
    if GATED in row:
        layer.utility_predictor = gates.UtilityPredictor(model_size, row, config).to(device)
    else:
        layer.utility_predictor = gates.FixedGates(row)
        state.windows = tuple(
            local_layers.layout_window(state, config.window, is_global=letter == GLOBAL)
            for letter in row
        )


def hook_layers(model: PreTrainedModel) -> None:
    """Switch ``model`` to ``spkv`` and hook its layers, once. Raises ``UserError``: it cannot (``attention.py``)."""
    if not attention.attention_layers(model):
        _hook_layers(model)


@unchanged_on_failure
def _hook_layers(model: PreTrainedModel) -> None:
    """Hook the layers of a dense model, as ``hook_layers``."""
    # Find the attention layers by a dry run
    before = model.config._attn_implementation
    model.set_attn_implementation("spkv")
    try:
        calls = dry_run(model)
    except UserError as error:
        if error.__cause__ is not None:  # raised by the model, perhaps without SP-KV attention, too
            _check_runs(model, before)
        raise
    # Of several calls with the same keys, the first one is of the layer that computed them
    sources = [next(other for other in calls if other.keys is call.keys) for call in calls]
    with_sources = list(zip(calls, sources, strict=True))
    _check_layers(model, [call for call, source in with_sources if call is source])
    # Install state and hooks
    settings = attention.GateSettings()
    for call, source in with_sources:
        if source is call:
            state = attention.LayerState(
                num_kv_heads=call.num_kv_heads,
                native_window=call.native_window,
                settings=settings,
                head_dim=call.head_dim,
                expanded_dim=call.expanded_dim,
            )
            attention.install(call.module, state)
        else:
            state = attention.layer_state(source.module)
            state.num_readers += 1
            attention.install(call.module, state, source.module)
    local_layers.mark_local_layers(attention.layer_states(model))
    prepare(model, before)


def prepare(
    model: PreTrainedModel, attn_implementation: str | None, use_cache: bool | None = None
) -> None:
    """Prepare a hooked model as a whole: its cache, the check of each call, and the state that ``detach`` restores.

    A forward pass creates a cache only on request, and ``generate`` creates one that the model can use. ``detach``
    restores ``attn_implementation`` (None: "sdpa") and ``use_cache``, by default the current one.
    """
    handles = (
        model.register_forward_pre_hook(_check_call, with_kwargs=True),
        model.register_forward_hook(attention_calls.forget_documents, always_call=True),
    )
    text = model.config.get_text_config()  # a vision-language model has its cache in this part
    if use_cache is None:
        use_cache = text.use_cache
    model._spkv_before = (attn_implementation, handles, use_cache)
    model._spkv_states = attention.layer_states(model)
    model._spkv_shares_keys = any(state.num_readers for state in model._spkv_states)
    model._prepare_cache_for_generation = partial(_prepare_cache, model)
    text.use_cache = False


def _prepare_cache(
    model: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: Keywords,
    mode: GenerationMode,
    *_: object,
) -> None:
    """Create an ``SPKVCache`` in ``generate``, whose method this replaces, unless the caller gives one.

    Gates compute without a cache unless they are open or hard, and a cache can hold what they keep. Raises
    ``UserError`` for decoding that crops the cache.
    """
    if mode == GenerationMode.ASSISTED_GENERATION:
        raise UserError(f"this model has gates or a layout: {layer_cache.NOT_ASSISTED}")
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, Cache):
        cache._is_user_defined = True  # generate then keeps it up to date
        return
    if config.use_cache and not _can_cache(model):
        config.use_cache = False
        if config.prefill_chunk_size is not None:
            raise UserError(
                "prefill_chunk_size needs a cache, which these gates cannot use: leave it out, or"
                ' call set_gate_mode(model, "hard")'
            )
    if config.cache_implementation is not None and config.use_cache is not False:
        warnings.warn(
            f"cache_implementation '{config.cache_implementation}' is ignored: "
            "this model uses SPKVCache",
            stacklevel=3,
        )
    if config.use_cache:
        model_kwargs["past_key_values"] = SPKVCache(model)


def _can_cache(model: PreTrainedModel) -> bool:
    """Return whether gates are open or hard and ``SPKVCache`` can hold what they keep; True for a layout."""
    gated = [state for state in attention.layer_states(model) if state.gate_window is not None]
    if not gated:
        return True
    if gated[0].settings.mode not in ("open", "hard"):
        return False
    try:
        return len(SPKVCache(model).layers) > 0
    except UserError:
        return False


def _check_call(
    model: PreTrainedModel, args: tuple[object, ...], kwargs: Keywords
) -> tuple[tuple[object, ...], Keywords]:
    """Refuse calls that SP-KV attention would compute wrongly; add an ``SPKVCache`` if a cache is requested."""
    # Name the positional arguments
    if args:
        names = inspect.signature(model.forward).parameters
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        args = ()
    _check_implementation(model)
    attention_calls.CALL.has_positions = kwargs.get("position_ids") is not None
    attention_calls.forget_documents()  # of a call that was interrupted
    # Check the cache, for which the config asks where the call does not say
    uses_cache = kwargs.get("use_cache")
    if uses_cache is None and getattr(model.config.get_text_config(), "use_cache", False):
        uses_cache = True
        kwargs = {**kwargs, "use_cache": True}
    cache = _usable_cache(model, kwargs)
    stores = cache is not None or bool(uses_cache)
    num_cached = 0 if cache is None else cache.get_seq_length()
    _refuse_weights_as_output(model, kwargs)
    # Check mask, positions and documents
    if not torch.compiler.is_compiling():
        kwargs = call_inputs.check_inputs(model, kwargs, num_cached, stores)
    if cache is None and uses_cache:
        kwargs = {**kwargs, "past_key_values": SPKVCache(model)}
    if stores:
        check_states(model, kwargs, num_cached)
    if model._spkv_shares_keys:
        kwargs = _with_all_queries(model, kwargs)
    return args, kwargs


def _check_implementation(model: PreTrainedModel) -> None:
    """Raise ``UserError`` if a hooked model has another attention function."""
    chosen = model.config._attn_implementation
    if chosen != "spkv":
        raise UserError(
            f"attn_implementation '{chosen}' ignores gates and windows: call detach(model) first"
        )


def _refuse_weights_as_output(model: PreTrainedModel, kwargs: Keywords) -> None:
    """Raise ``UserError`` for a call that asks for attention weights."""
    if kwargs.get("output_attentions") or getattr(model.config, "output_attentions", False):
        raise UserError(
            "SP-KV attention computes no attention weights: leave output_attentions off"
        )


def _usable_cache(model: PreTrainedModel, kwargs: Keywords) -> SPKVCache | None:
    """Return the cache of a call, if there is one. Raises ``UserError`` unless the call can read and fill it."""
    cache = kwargs.get("past_key_values")
    uses_cache = kwargs.get("use_cache")
    if cache is None and not uses_cache:
        return None
    if cache is not None and uses_cache is False:
        raise UserError(
            "use_cache=False with a cache would store every token twice: leave use_cache out"
        )
    _check_keeps_cache(model)
    if cache is None:
        return None
    if not isinstance(cache, SPKVCache):
        raise attention.cache_error(cache)
    tokens = call_inputs.new_tokens(kwargs)
    cache.prepare_call(model, None if tokens is None else len(tokens))
    return cache


def _check_keeps_cache(model: PreTrainedModel) -> None:
    """Raise ``UserError`` for activation checkpointing in training mode, with which layers get no cache."""
    training = (module for module in model.modules() if module.training)
    if any(getattr(module, "gradient_checkpointing", False) for module in training):
        raise UserError(
            "activation checkpointing in training mode drops the cache, "
            "so tokens would not see earlier ones: call model.eval() before, "
            "and model.train() after, or give use_cache=False"
        )


def _with_all_queries(model: PreTrainedModel, kwargs: Keywords) -> Keywords:
    """Name the kept logits by their indices, because layers that share keys compute only those of a number.

    Gemma 4 passes such a number of queries to them, for which it slices a mask of another form than ours.
    """
    num_kept = kwargs.get("logits_to_keep", 0)
    tokens = call_inputs.new_tokens(kwargs)
    if tokens is None or not isinstance(num_kept, int):
        return kwargs
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return kwargs
    indices = torch.arange(tokens.shape[1], device=tokens.device)
    return {**kwargs, "logits_to_keep": indices[-num_kept:]}


def _check_runs(model: PreTrainedModel, attn_implementation: str | None) -> None:
    """Raise ``UserError`` if a model cannot run with its own attention either, so that nothing else is blamed."""
    model.set_attn_implementation(attn_implementation or "sdpa")
    try:
        _run(model)
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} cannot run on two tokens, before any gates or layout: "
            f"{first_line(error)}\n"
            "make model(input_ids=torch.tensor([[0, 0]])) work first"
        ) from error


def _check_layers(model: PreTrainedModel, calls: Sequence[attention_calls.RecordedCall]) -> None:
    """Raise ``UserError`` unless the layers that made ``calls`` are placed and numbered as the config says."""
    layers = [call.module for call in calls]
    reason = layer_places.miscounted(model, layers)
    if reason is not None:
        raise UserError(f"{type(model).__name__}: {reason}")
    layer_places.check_order(model, layers)
    indices = attention_indices(cache_layers(model.config))
    layer_places.check_numbers(model, layers, indices)
    layer_places.check_kinds(model, [call.native_window for call in calls], indices)


@torch.no_grad()
def _run(model: PreTrainedModel) -> attention_calls.Recording:
    """Run one forward pass over 2 tokens, and return the recorded attention calls."""
    device = placement.input_device(model)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    mask = torch.ones_like(tokens)
    with modes.evaluation_mode(model), attention_calls.watch_calls() as recording:
        model(input_ids=tokens, attention_mask=mask, use_cache=False)
    return recording


def dry_run(model: PreTrainedModel) -> list[attention_calls.RecordedCall]:
    """Run one forward pass over 2 tokens through ``spkv``, and return the attention calls in order.

    Raises ``UserError`` unless each attention layer of the model calls the function exactly once, with every limit that
    its mask sets.
    """
    # Count the layers that store keys and values
    try:
        expected = len(attention_indices(cache_layers(model.config)))
    except UserError as error:
        raise UserError(f"{type(model).__name__}: {error}") from error
    # Run the model, and compare with the layers that compute attention
    recording = _checked_run(model)
    _check_reached(model, recording.calls, expected)
    _check_limits(model, recording)
    return recording.calls


def _checked_run(model: PreTrainedModel) -> attention_calls.Recording:
    """Do as ``_run``. Raises ``UserError`` for any error, such as of a model that runs with its own attention only."""
    try:
        return _run(model)
    except UserError:
        raise
    except Exception as error:
        if is_short_of_memory(error):
            raise UserError(
                f"{type(model).__name__}: too little memory for a pass over two tokens: "
                f"{first_line(error)}\n"
                "free memory on its device, or load the model in a smaller dtype"
            ) from error
        raise UserError(
            f"{type(model).__name__} cannot run with SP-KV attention: {first_line(error)}"
        ) from error


def _check_reached(
    model: PreTrainedModel, calls: list[attention_calls.RecordedCall], expected: int
) -> None:
    """Raise ``UserError`` unless the ``expected`` attention layers of a model made one call each."""
    num_layers = len({id(call.module) for call in calls})
    num_sources = len({id(call.keys) for call in calls})
    if calls and num_sources == expected and len(calls) == num_layers:
        return
    reason = (
        "its class does not use the attention interface of transformers, "
        "so gates would have no effect"
    )
    if calls:
        miscounted = layer_places.miscounted(model, [call.module for call in calls])
        reason = miscounted or layer_places.own_config(model) or reason
    if len(calls) > min(expected, num_layers):
        reason = (
            "a layer that is repeated, or has several attentions, "
            "has no single choice for each of its heads"
        )
    raise UserError(
        f"{type(model).__name__}: its {expected} attention layers called the attention function "
        f"{len(calls)} times with {num_sources} sets of keys; SP-KV needs each layer exactly once\n"
        f"{reason}"
    )


def _check_limits(model: PreTrainedModel, recording: attention_calls.Recording) -> None:
    """Raise ``UserError`` if a mask limits attention to fewer keys than its layer told the attention function."""
    text = model.config.get_text_config()
    # Some models make masks that none of their kinds of layers uses
    layer_types = getattr(text, "layer_types", None) or []
    has_limits = any("sliding" in kind or "chunked" in kind for kind in layer_types)
    if layer_types and not has_limits:
        return
    # Nothing exceeds a limit of as many keys as the model has positions
    longest = getattr(text, "max_position_embeddings", None) or attention.GLOBAL_WINDOW
    limits = [limit for limit in recording.undeclared_windows if limit < longest]
    if limits:
        raise UserError(
            f"{type(model).__name__}: its mask alone limits attention to {limits[0]} keys, "
            "as chunked attention does, which SP-KV attention does not compute"
        )


def check_hooks(calls: list[attention_calls.RecordedCall], what: str) -> None:
    """Set the head size of each hooked layer; ``UserError`` about ``what`` unless its state agrees with its call."""
    for index, call in enumerate(calls):
        state = getattr(call.module, "spkv", None)
        if not isinstance(state, attention.LayerState):
            raise UserError(
                f"{what}: section 'spkv' of its config leaves out attention layer {index}"
            )
        state.head_dim = call.head_dim
        state.expanded_dim = call.expanded_dim
        saved = (state.num_kv_heads, state.native_window)
        actual = (call.num_kv_heads, call.native_window)
        if saved != actual:
            message = (
                f"{what}: section 'spkv' of its config gives attention layer {index} {saved[0]} KV "
                f"heads and the window {saved[1]}; it has {actual[0]} and {actual[1]}"
            )
            if call.expanded_dim:
                message += " (its heads share one latent, so a layout has one letter per layer)"
            raise UserError(message)
