"""Apply attention windows to the KV heads of a model: those of a layout, or temporarily full or local attention."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.artifacts import gate_config, local_layers
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.model import attach, attention, config_section, modes, placement
from spkv_nas.model.learned_sinks import LearnedSinks, layer_learned_sinks
from spkv_nas.model.snapshot import unchanged_on_failure


@unchanged_on_failure
def apply_layout(
    model: PreTrainedModel, layout: Layout, window: int | None = None, sinks: int | None = None
) -> None:
    """Apply ``layout`` to ``model`` in place: local heads see sink tokens and a window, global heads all keys.

    Gates are removed, because a hybrid has none. Layers with a native sliding window get no wider window; beside layers
    of full attention they keep theirs, and get no sink tokens, because they were trained without. Learned sinks stay if
    the model has this layout already; others belong to another layout, and are removed.

    Example::

        spkv_nas.apply_layout(model, layouts["densest"])
        spkv_nas.save(model, tokenizer, "hybrid")  # loads with its layout
        spkv_nas.detach(model)  # dense again

    Args:
        model: dense, hybrid or gated.
        layout: global and local KV heads.
        window: recent keys that a local head sees; None: the layout's.
        sinks: first tokens of a sequence that a local head sees as well; None: the layout's.

    Raises ``UserError``: the layout is for another number of layers or KV heads, or the model cannot be hooked (see
    ``attention.py``).
    """
    # Remove gates and hook the layers
    if any(state.gate_window is not None for state in attention.layer_states(model)):
        attach.detach(model)
    attach.hook_layers(model)
    layout = _with_reach(layout, window, sinks)
    # Check the layout against the model
    windows = layout_windows(model, layout)
    # Set the windows; learned sinks stay only with the layout that they were trained for
    before = config_section.checkpoint_layout(model)
    keeps_learned = before is not None and before.content_hash == layout.content_hash
    for layer, row in zip(attention.attention_layers(model).values(), windows, strict=True):
        state = attention.layer_state(layer)
        learned = layer_learned_sinks(layer)
        state.set_windows(row, layout.sinks)
        state.learned_sinks = keeps_learned and learned is not None
        if learned is not None and not keeps_learned:
            del layer.learned_sinks
    config_section.write_section(model, layout)


@unchanged_on_failure
def add_learned_sinks(model: PreTrainedModel, logits: Sequence[Tensor] | None = None) -> None:
    """Add learned sinks to the local heads of a hybrid, in place: trainable float32 parameters (``learned_sinks.py``).

    They belong to its layout: ``full_attention`` and other layouts are without them. Layers with a native sliding
    window beside layers of full attention get none, because they were trained without. ``logits`` are the initial ones
    [Hq] of each attention layer; None: 0. Raises ``UserError`` if the model has no layout, or learned sinks of its own.
    """
    layout = config_section.checkpoint_layout(model)
    if layout is None:
        raise UserError("learned sinks are for local heads: this model has no layout")
    attach_learned_sinks(model)
    # Check that the model runs with learned sinks
    attach.dry_run(model)
    # Set their logits
    for index, layer in enumerate(attention.attention_layers(model).values()):
        learned = layer_learned_sinks(layer)
        if learned is not None and logits is not None:
            learned.assign(logits[index])
    config_section.write_section(model, layout)


def attach_learned_sinks(model: PreTrainedModel) -> None:
    """Attach learned sinks of 0 to the layers with local heads of a model whose windows are set."""
    num_heads = model.config.get_text_config().num_attention_heads
    for layer in attention.attention_layers(model).values():
        state = attention.layer_state(layer)
        is_local = [
            local_layers.takes_sinks(state, window) for window in state.head_windows(gated=False)
        ]
        if any(is_local):
            device = placement.layer_device(layer)  # layers may be on different devices
            layer.learned_sinks = LearnedSinks(is_local, num_heads // state.num_kv_heads, device)
            state.learned_sinks = True


@contextmanager
def layout_applied(
    model: PreTrainedModel, layout: Layout, window: int | None = None, sinks: int | None = None
) -> Iterator[PreTrainedModel]:
    """Apply a layout inside the ``with`` block, and restore the model's gates or layout after it.

    A model that has this layout already keeps its learned sinks, as in ``apply_layout``.

        with spkv_nas.layout_applied(model, layout):
            spkv_nas.evaluate(model, blocks)

    Arguments and errors are those of ``apply_layout``; yields the model, without its wrapper.
    """
    current = config_section.checkpoint_layout(model)
    applied = _with_reach(layout, window, sinks)
    with attach.restored(model):
        # A model that has the layout already keeps its learned sinks
        if current is None or current.content_hash != applied.content_hash:
            attach.detach(model)
            apply_layout(model, applied)
        yield model


def _with_reach(layout: Layout, window: int | None, sinks: int | None) -> Layout:
    """Return a layout whose local heads have another window or other sink tokens; None keeps the layout's."""
    if window is not None:
        layout.check_one_window("leave the window out")
    return replace(
        layout,
        window=layout.window if window is None else window,
        sinks=layout.sinks if sinks is None else sinks,
    )


def layout_windows(model: nn.Module, layout: Layout) -> list[tuple[int, ...]]:
    """Return the window of every KV head, by layer. Raises ``UserError`` if the layout does not fit the model."""
    attach.check_rows("the layout", layout.heads_per_layer, model)
    return [
        tuple(
            local_layers.layout_window(state, window or 0, is_global=window is None)
            for window in row
        )
        for state, row in zip(attention.layer_states(model), layout.head_windows, strict=True)
    ]


@contextmanager
def full_attention(model: PreTrainedModel) -> Iterator[list[attention.LayerState]]:
    """Let every head see all keys inside the ``with`` block, and restore gates or layout after it.

    Layers with a native sliding window keep it, and learned sinks of a layout do not act. The model is in evaluation
    mode. Yields the layers' states in order, whose windows (``LayerState.set_windows``) and observers the block may
    set. Raises ``UserError``: the model cannot be hooked (see ``attention.py``).
    """
    was_hooked = bool(attention.attention_layers(model))
    attach.hook_layers(model)
    states = attention.layer_states(model)
    # Remember windows and sinks, which open heads replace
    before = [(state.windows, state.sinks, state.learned_sinks) for state in states]
    with (
        modes.evaluation_mode(model),
        modes.gate_mode(model, "open") if config_section.gate_config(model) else nullcontext(),
    ):
        try:
            # Windows override gates
            for state in states:
                state.set_windows((state.checkpoint_window,) * state.num_kv_heads)
            yield states
        finally:
            for state, (windows, sinks, learned_sinks) in zip(states, before, strict=True):
                state.windows = windows
                state.sinks = sinks
                state.learned_sinks = learned_sinks
                state.observer = None
            if not was_hooked:
                attach.detach(model)


@contextmanager
def every_head_local(model: PreTrainedModel, window: int, sinks: int = 0) -> Iterator[None]:
    """Make every head local inside the block, which shows what the model can do without long-range attention."""
    with full_attention(model) as states:
        for state in states:
            reach = local_layers.layout_window(state, window, is_global=False)
            state.set_windows((reach,) * state.num_kv_heads, sinks)
        yield


def local_window(model: PreTrainedModel) -> int | None:
    """Return the window of a model's gates or layout, in keys; None if it has neither."""
    described = config_section.gate_config(model) or config_section.checkpoint_layout(model)
    return None if described is None else described.window


def local_sinks(model: PreTrainedModel) -> int:
    """Return the sink tokens of local heads of a model with a layout; 0 for any other model."""
    layout = config_section.checkpoint_layout(model)
    return 0 if layout is None else layout.sinks


def default_window(model: PreTrainedModel, block_size: int) -> int:
    """Choose the window of local heads when none is specified; all signals and scores use this rule.

    A model with gates or a layout keeps its window. Any other model gets ``suitable_window``: a sixteenth of the
    ``block_size`` tokens of the blocks it is measured on, at most 128 keys.
    """
    return local_window(model) or gate_config.suitable_window(block_size)
