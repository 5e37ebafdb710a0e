"""Public entry point for probing: measure one of the signals that rank KV heads by their need for global attention.

Every signal returns the same ``HeadScores`` table, with higher values for heads that need global attention, so that
layouts can be proposed from any of them and compared by retraining. Density needs a model with SP-KV gates. The other
signals work on any supported decoder and keep gates, if the model has them, fully open.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.local_layers import cache_facts, native_windows
from spkv_nas.base.device import dtype_name
from spkv_nas.base.entry import check_options
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import micro_batch, separators
from spkv_nas.model import config_section
from spkv_nas.model.attention import heads_per_layer
from spkv_nas.model.windows import default_window, full_attention
from spkv_nas.probing.heads import check_window
from spkv_nas.probing.signal import Signal
from spkv_nas.probing.signals import DENSITY, SIGNALS
from spkv_nas.probing.sinks import choose_sinks
from spkv_nas.probing.window_choice import measure_within

_RUN = ("batch_size", "cache")  # arguments of ``measure`` that are no options of a signal


def probe(
    model: PreTrainedModel,
    blocks: TokenBlocks | Iterable[str],
    tau: float | None = None,
    *,
    signal: str | Signal = DENSITY.name,
    window: int | None = None,
    sinks: int | None = None,
    memory: str | float | None = None,
    context: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> HeadScores:
    """Score every KV head of ``model`` by its need for global attention; the model is restored afterwards.

    Args:
        model: any supported decoder; "density" needs gates, the other built-in signals keep gates open.
        blocks: held-out text, either as token blocks or as strings, which are tokenized into blocks.
        tau: gate threshold in [0, 1], for "density" only; None uses the model's threshold.
        signal: one of ``SIGNALS``, by name, or another signal; "head-gates" selects the best heads (reports/study).
        window: number of recent keys a local head sees, including the query's own key. Not accepted by "density";
            defaults to ``default_window``.
        sinks: number of first tokens that a local head sees as well (sink tokens); None: ``choose_sinks``.
        memory: limit on the KV cache, as a share of full attention's ("20%" or 0.2) or in bytes ("2GiB"): the heads
            are ranked for it, and the window, unless given, is chosen with them (``window_choice``).
        context: tokens per sequence for which ``memory`` is counted; None: the model's context.
        tokenizer: the model's tokenizer; required if ``blocks`` are strings.
        name: name of the table; defaults to the signal's name, or to "probe" for density.
        metadata: provenance of the model and the text, stored with the table.
        progress: called with (blocks or steps done, total).
        options: options of the signal, such as ``batch_size`` for "density" or ``budget`` and ``steps`` for
            "head-gates".

    Raises ``UserError``: the signal is unknown or lacks an option, or it cannot be measured on this model and text.
    """
    entry = SIGNALS[signal]
    if window is not None and entry.needs_gates:
        raise UserError(f"signal {entry.name} uses the window of the model's gates: leave window out")
    name = name or ("probe" if entry.name == DENSITY.name else entry.name)
    blocks = blocks if isinstance(blocks, TokenBlocks) else separators.text_blocks(model, blocks, tokenizer)
    options |= {"window": window, "sinks": sinks, "tau": tau, "memory": memory, "context": context}
    return measure_signal(entry, model, blocks, name=name, metadata=metadata, progress=progress, **options)


def measure_signal(
    signal: str | Signal,
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    window: int | None = None,
    sinks: int | None = None,
    memory: str | float | None = None,
    context: int | None = None,
    name: str = "probe",
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> HeadScores:
    """Measure a signal, given or named, on token blocks, with the arguments of ``probe``; None takes the default.

    A signal of gates uses their window. Layouts of the table have the sink tokens that it was measured with.
    ``options`` are the signal's, and ``batch_size`` and ``cache`` where it takes them. Raises ``UserError``: the signal
    lacks an option or cannot be measured on this model, or the blocks are too short.
    """
    # Check options and model
    entry, run = _configured(SIGNALS[signal], options)
    if memory is not None and options.get("budget") is not None:
        raise UserError("give a limit of memory or a budget, not both: the memory says how many heads are global")
    micro_batch.check_blocks(model, blocks)
    # Choose window and sink tokens
    first_window = _window(entry, model, blocks) if window is None or entry.needs_gates else window
    if first_window < 1:
        raise UserError(f"the window is {window}; it must be at least 1, because it includes the query's own key")
    number, facts = choose_sinks(model, blocks, first_window) if sinks is None else (sinks, {})
    if entry.takes_sinks and (number or sinks is not None):
        run["sinks"] = number

    def measured(signal: Signal, text: TokenBlocks, reach: int) -> HeadScores:
        if signal.reads_blocks:
            check_window(text, reach, number if signal.takes_sinks else 0)
        return signal.measure(model, text, reach, name=name, metadata=metadata, progress=progress, **run)

    # Measure, within a limit of memory with the window that loses least
    if memory is None:
        table = measured(entry, blocks, first_window)
    else:
        reach: dict[str, Any] = {"window": first_window if entry.needs_gates else window, "sinks": number}
        table = measure_within(memory, context, model, blocks, entry, measured, **reach, progress=progress)
    return _with_facts(table, entry, model, blocks, {**({"sinks": number} if number else {}), **facts})


def _with_facts(
    table: HeadScores, entry: Signal, model: PreTrainedModel, blocks: TokenBlocks, sink_facts: Mapping[str, Any]
) -> HeadScores:
    """Return a table with what its layouts and the size of their KV cache depend on, and its documents."""
    with full_attention(model) as states:
        windows, sizes = native_windows(states), [state.head_dim for state in states]
        head_dim = cache_facts(states, heads_per_layer(states), sizes)["head_dim"]
    table_facts = {"kind": entry.kind, "unit": entry.unit, **sink_facts, **windows}
    # Add what the size of the KV cache depends on, and the context if the config says it
    facts = {"head_dim": head_dim, **({"head_dims": sizes} if len({*sizes}) > 1 else {})}
    facts["dtype"] = dtype_name(model.dtype)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    facts |= {"positions": positions} if isinstance(positions, int) else {}
    metadata = {**facts, **table.metadata, **table_facts}
    return replace(table, metadata=metadata, selected_on=blocks.text_ids)


def _configured(entry: Signal, options: Mapping[str, Any]) -> tuple[Signal, dict[str, Any]]:
    """Return a signal with its options, and the options of its run, ``batch_size`` and ``cache``.

    Raises ``UserError``: the signal lacks an option, or a value does not fit it.
    """
    set_options = {name: value for name, value in options.items() if value is not None}
    check_options(SIGNALS, entry, set_options)
    run = {name: set_options.pop(name) for name in _RUN if name in set_options}
    known = {field.name for field in fields(entry)} - {*entry.used_by_command}  # type: ignore[arg-type]
    if unknown := sorted(set_options.keys() - known):
        names = ", ".join(sorted({*known, *_RUN}))
        raise UserError(f"signal {entry.name} has no option '{unknown[0]}'; it takes {names}")
    return entry.with_options(set_options), run


def _window(entry: Signal, model: PreTrainedModel, blocks: TokenBlocks) -> int:
    """Return the window of the model's gates for a signal that needs them, else the default."""
    if not entry.needs_gates:
        return default_window(model, blocks.block_size)
    config = config_section.gate_config(model)
    if config is None:
        raise UserError(f"this model has no gates, so it has no {entry.name}: train an SP-KV reference model first")
    return config.window
