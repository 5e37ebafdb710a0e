"""Public entry point for probing: measure one of the signals that rank KV heads by their need for global attention.

Every signal returns the same ``HeadScores`` table, with higher values for heads that need global attention, so that
layouts can be proposed from any of them and compared by retraining. Density needs a model with SP-KV gates. The other
signals work on any supported decoder and keep gates, if the model has them, fully open.

Within a limit of memory, the window of local heads is chosen together with the number of global heads: at equal memory
a wider window leaves fewer of them. Which trade loses least depends on the model, so it is measured: the heads are
ranked once, and layouts without training are compared on documents that the ranking has not seen
(``evaluation.contest``). For each number of global heads only the widest window that fits is tried, because it loses
least; where the signal measures costs of windows, layouts of several kinds are (``proposal.windows.rival_layouts``).

Costs of windows are checked on documents that ranked no head, whether there is a limit of memory or not. Where they do
not order random layouts by what these lose, head gates are learned, too (``probing.prediction_check``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts import defaults, kinds
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.local_layers import cache_facts, config_layers, native_windows
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base import device
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Progress, in_sequence
from spkv_nas.cost.cache_cost import CacheCost, memory_bytes
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.held_out import hold_out
from spkv_nas.evaluation import micro_batch, separators
from spkv_nas.evaluation.checked_calls import checked_calls
from spkv_nas.evaluation.contest import (
    USUAL_BLOCKS,
    Contest,
    Entrant,
    most_tokens,
    passes_of_contest,
    run_contest,
)
from spkv_nas.model import attention, config_section, model_shape, windows
from spkv_nas.probing import prediction_check, window_costs
from spkv_nas.probing.heads import check_window
from spkv_nas.probing.signals import DENSITY, SIGNALS, WINDOW_COSTS, Signal
from spkv_nas.probing.sinks import choose_sinks
from spkv_nas.proposal.windows import (
    NARROWEST,
    ONE_WINDOW,
    USUAL_RIVALS,
    TriedWindow,
    at_window,
    candidate_windows,
    one_window_layout,
    predicted_loss,
    rival_layouts,
    typical_windows,
)

_RUN = ("batch_size", "cache")  # arguments of ``measure`` that are no options of a signal
# Shares of the KV cache at which costs are checked without a limit of memory: the first with enough layouts. In blocks
# of 128 tokens, windows of 32 alone take a quarter
_CHECKED = (0.25, 0.5)
_LARGEST = 4096  # blocks of a text of which half is taken
_MEMORY_OR_BUDGET = (
    "give a limit of memory or a budget, not both: the memory says how many heads are global"
)
_Measure = Callable[[Signal, TokenBlocks, int, Progress | None], HeadScores]


def probe(
    model: PreTrainedModel,
    blocks: TokenBlocks | Iterable[str],
    tau: float | None = None,
    *,
    signal: str | Signal = DENSITY.name,
    window: int | None = None,
    sinks: int | None = None,
    memory: str | float | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    metadata: dict[str, object] | None = None,
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
            are ranked for it, and the window, unless given, is chosen with them (``measure_within``). It is counted
            for sequences of the blocks' length, at which losses are measured.
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
        raise UserError(
            f"signal {entry.name} uses the window of the model's gates: leave window out"
        )
    if name is None or not name:
        name = "probe" if entry.name == DENSITY.name else entry.name
    if not isinstance(blocks, TokenBlocks):
        blocks = separators.text_blocks(model, blocks, tokenizer)
    return measure_signal(
        entry,
        model,
        blocks,
        window=window,
        sinks=sinks,
        memory=memory,
        name=name,
        metadata=metadata,
        progress=progress,
        tau=tau,
        **options,
    )


def measure_signal(
    signal: str | Signal,
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    window: int | None = None,
    sinks: int | None = None,
    memory: str | float | None = None,
    name: str = "probe",
    metadata: dict[str, object] | None = None,
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
        raise UserError(_MEMORY_OR_BUDGET)
    micro_batch.check_blocks(model, blocks)
    # Choose window and sink tokens
    if entry.needs_gates:
        window = _gate_window(entry, model)
    first_window = _first_window(model, blocks, window)
    num_sinks, sink_facts = _sinks(model, blocks, first_window, sinks)
    if entry.takes_sinks and (num_sinks or sinks is not None):
        run["sinks"] = num_sinks

    def measured(
        signal: Signal, text: TokenBlocks, reach: int, progress: Progress | None
    ) -> HeadScores:
        if signal.reads_blocks:
            check_window(text, reach, num_sinks if signal.takes_sinks else 0)
        with checked_calls(model, f"signal {signal.name}", text):
            return signal.measure(
                model, text, reach, name=name, metadata=metadata, progress=progress, **run
            )

    # Measure, within a limit of memory with the window that loses least
    if memory is not None:
        table = measure_within(
            memory,
            model,
            blocks,
            entry,
            measured,
            window=window,
            sinks=num_sinks,
            progress=progress,
        )
    elif entry.name == WINDOW_COSTS.name:
        table = _measure_costs(model, blocks, entry, measured, first_window, num_sinks, progress)
    else:
        table = measured(entry, blocks, first_window, progress)
    return _with_facts(table, entry, model, blocks, sink_facts)


def _with_facts(
    table: HeadScores,
    entry: Signal,
    model: PreTrainedModel,
    blocks: TokenBlocks,
    sink_facts: Mapping[str, object],
) -> HeadScores:
    """Return a table with what its layouts and the size of their KV cache depend on, and its documents."""
    with windows.full_attention(model) as states:
        sizes = [state.head_dim for state in states]
        cache = cache_facts(states, attention.heads_per_layer(states), sizes)
        windows_by_layer = native_windows(states)
    # What the size of the KV cache depends on, and the context if the config says it
    facts = {"head_dim": cache["head_dim"]}
    if len({*sizes}) > 1:
        facts["head_dims"] = sizes
    facts["dtype"] = device.dtype_name(model.dtype)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int):
        facts["positions"] = positions
    facts["block_size"] = blocks.block_size
    # What the table must say, whatever its signal recorded
    table_facts = {"kind": entry.kind, "unit": entry.unit, **sink_facts, **windows_by_layer}
    record = ProbeRecord.of({**facts, **table.record.entries(), **table_facts})
    return replace(table, record=record, selected_on=blocks.text_ids)


def _configured(entry: Signal, options: Mapping[str, object]) -> tuple[Signal, dict[str, Any]]:
    """Return a signal with its options, and the options of its run, ``batch_size`` and ``cache``.

    Raises ``UserError``: the signal lacks an option, or a value does not fit it.
    """
    set_options = {name: value for name, value in options.items() if value is not None}
    SIGNALS.check_options(entry, set_options)
    run = {name: set_options.pop(name) for name in _RUN if name in set_options}
    names_of_fields = {field.name for field in fields(entry)}  # type: ignore[arg-type]
    known = names_of_fields - {*entry.used_by_command}
    unknown = sorted(set_options.keys() - known)
    if unknown:
        names = ", ".join(sorted({*known, *_RUN}))
        raise UserError(f"signal {entry.name} has no option '{unknown[0]}'; it takes {names}")
    return entry.with_options(set_options), run


def _first_window(model: PreTrainedModel, blocks: TokenBlocks, window: int | None) -> int:
    """Return the ``window`` to measure at, None: the default. Raises ``UserError``: it has no key."""
    if window is None:
        return windows.default_window(model, blocks.block_size)
    if window < 1:
        raise UserError(
            f"the window is {window}; it must be at least 1, because it includes the query's own "
            "key"
        )
    return window


def _sinks(
    model: PreTrainedModel, blocks: TokenBlocks, window: int, sinks: int | None
) -> tuple[int, dict[str, object]]:
    """Return the number of sink tokens, chosen if ``sinks`` is None, and the entries about it for the record."""
    facts: dict[str, object] = {}
    if sinks is None:
        sinks, facts = choose_sinks(model, blocks, window)
    return sinks, {"sinks": sinks, **facts} if sinks else facts


def _gate_window(entry: Signal, model: PreTrainedModel) -> int:
    """Return the window of the model's gates. Raises ``UserError``: it has none, and the signal needs them."""
    config = config_section.gate_config(model)
    if config is None:
        raise UserError(
            f"this model has no gates, so it has no {entry.name}: train an SP-KV reference model "
            "first"
        )
    return config.window


def measure_within(
    memory: str | float,
    model: PreTrainedModel,
    blocks: TokenBlocks,
    signal: Signal,
    measure: _Measure,
    *,
    window: int | None = None,
    sinks: int = 0,
    progress: Progress | None = None,
) -> HeadScores:
    """Measure a signal for a limit of memory, and choose the window of local heads; must be called on all ranks.

    ``memory`` is a limit as ``cache_cost.memory_bytes`` takes it, for a sequence as long as the blocks. Where the
    ``signal`` takes a budget, it is the number of global heads that the memory leaves. ``measure`` measures a signal on
    a text at a window, and calls a progress. With a ``window`` none is chosen; local heads see ``sinks`` tokens as
    well. ``progress`` is called with (passes over a block done, total).

    Returns:
        The table at the window of the best layout with one window. Its record has ``memory``, ``context``, the
        ``budget`` of global heads of that layout, ``layouts_tried`` with what each is predicted and was measured to
        lose on documents that ranked no head, and the name of the ``recommended`` one.

    Raises ``UserError``: the memory leaves no global head, or no document can be held out.
    """
    if getattr(signal, "granularity", None) == kinds.LAYER:
        raise UserError(
            "a limit of memory counts single heads: leave out --granularity layer, or the limit"
        )
    context = blocks.block_size
    cost, num_heads = _cache_cost(model, context, window or NARROWEST, sinks)
    limit = memory_bytes(memory, cost, num_heads)
    full = cost.full(num_heads)
    if window is None:
        candidates = candidate_windows(cost, num_heads, limit, blocks.block_size // 2)
    else:
        candidates = [TriedWindow(window, cost.largest_budget(limit, num_heads), limit / full)]
    # Rank the heads at a typical window
    first = typical_windows(candidates, cost, limit, num_heads)[0]
    if "budget" in signal.options():
        signal = signal.with_options({"budget": str(first.num_global)})
    record: dict[str, object] = {
        "memory": round(limit / full, 6),
        "context": context,
        "budget": first.num_global,
    }
    if len(candidates) == 1:
        table = measure(signal, blocks, first.window, progress)
    else:
        table, choice = _choose_window(
            model, blocks, signal, measure, cost, limit, candidates, first.window, progress
        )
        record |= choice
    return replace(table, record=ProbeRecord.of({**table.record.entries(), **record}))


def _choose_window(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    signal: Signal,
    measure: _Measure,
    cost: CacheCost,
    limit: int,
    candidates: Sequence[TriedWindow],
    ranked_at: int,
    progress: Progress | None,
) -> tuple[HeadScores, dict[str, object]]:
    """Rank the heads at the window ``ranked_at``, and choose another on documents that the ranking has not seen.

    Returns:
        The table at the window of the best layout with one window, and the entries for its record.
    """
    ranking, held_out = hold_out(blocks, most_tokens(blocks.block_size))
    # Count all steps in passes over a block; the layouts to compare are about as many as the windows
    usual_blocks = min(held_out.num_blocks, USUAL_BLOCKS)
    sizes = [_passes(signal, model, ranking), passes_of_contest(len(candidates), usual_blocks)]
    if signal.name == WINDOW_COSTS.name:
        sizes.insert(1, prediction_check.passes(blocks.block_size))
    table = measure(signal, ranking, ranked_at, in_sequence(progress, sizes)[0])
    if table.window_costs is not None:
        shares = [limit / cost.full(table.num_heads)]
        table, sizes = _checked(
            table, model, (ranking, held_out), cost, shares, measure, sizes, progress
        )
    entrants = _entrants(table, cost, limit, candidates)
    contest = _contest(model, held_out, entrants, in_sequence(progress, sizes)[-1])
    best = next(entrant.layout for entrant in contest.ranked if entrant.name.startswith(ONE_WINDOW))
    # Forget the hash of the table at the other window: this one is the probe
    table = replace(at_window(table, best.window), probe_hash=None)
    return table, {"budget": best.num_global, "ranked_at": ranked_at, **contest.record()}


def _measure_costs(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    signal: Signal,
    measure: _Measure,
    window: int,
    sinks: int,
    progress: Progress | None,
) -> HeadScores:
    """Measure costs of windows without a limit of memory, and check them on documents that ranked no head.

    A text that leaves no such document is measured without a check, with a warning. Must be called on all ranks.
    """
    try:
        ranking, held_out = hold_out(
            blocks, prediction_check.usual_blocks(blocks.block_size) * blocks.block_size
        )
    except UserError:
        SILENT.caution(
            "the costs of windows are not checked: the text leaves no document that ranked no head"
        )
        return measure(signal, blocks, window, progress)
    sizes = [_passes(signal, model, ranking), prediction_check.passes(blocks.block_size)]
    table = measure(signal, ranking, window, in_sequence(progress, sizes)[0])
    cost, _ = _cache_cost(model, blocks.block_size, NARROWEST, sinks)
    return _checked(table, model, (ranking, held_out), cost, _CHECKED, measure, sizes, progress)[0]


def _passes(signal: Signal, model: PreTrainedModel, blocks: TokenBlocks) -> float:
    """Return the passes over a block that a signal takes on a text."""
    work = signal.work(
        model_shape.config_shape(model.config).grid, blocks.tokens.size, blocks.block_size
    )
    return work.passes * work.effort * work.tokens / blocks.block_size


def passes_after(signal: Signal, blocks: TokenBlocks, *, has_memory: bool) -> float:
    """Return about how many passes over a block follow a signal: the check of costs, and the comparison of layouts."""
    if signal.name != WINDOW_COSTS.name:
        return 0.0
    checking = prediction_check.passes(blocks.block_size)
    if not has_memory:
        return checking
    held_out = min(
        most_tokens(blocks.block_size) // blocks.block_size, blocks.num_blocks // 4, USUAL_BLOCKS
    )
    return checking + passes_of_contest(USUAL_RIVALS, held_out)


def _checked(
    table: HeadScores,
    model: PreTrainedModel,
    texts: tuple[TokenBlocks, TokenBlocks],
    cost: CacheCost,
    shares: Sequence[float],
    measure: _Measure,
    sizes: list[float],
    progress: Progress | None,
) -> tuple[HeadScores, list[float]]:
    """Check a table's costs of windows, and learn head gates where they are no guide.

    Args:
        table: scores with costs of windows.
        model: the model that they were measured on.
        texts: the text that ranked the heads, and one that ranked none.
        cost: size of the KV cache.
        shares: shares of full attention's KV cache, of which the first with enough layouts is checked.
        measure: measures a signal, as in ``measure_within``.
        sizes: passes over a block of all steps of the command: the costs, the check, and what follows.
        progress: called with (passes over a block done, total).

    Returns:
        The table with the check in its record, and the head gates if they were learned; and the passes of all steps.
    """
    ranking, held_out = texts
    check = None
    for share in shares:
        # Head gates, if they are needed, choose global heads: the memory must leave one
        limit = int(share * cost.full(table.num_heads))
        try:
            candidates = candidate_windows(cost, table.num_heads, limit, ranking.block_size // 2)
        except UserError:
            continue
        step = in_sequence(progress, sizes)[1]
        check = prediction_check.check_predictions(
            model, table, held_out, cost, share, progress=step
        )
        if check is not None:
            break
    if check is None:
        SILENT.caution(
            "the costs of windows are not checked: the model has too few different layouts of one "
            "memory"
        )
        return table, sizes
    table = table.with_record(prediction_check=check.as_mapping())
    if not check.has_failed:
        return table, sizes
    # Learn gates for the memory of the check, at a typical window
    SILENT.caution(f"{check.sentence}; head gates are learned, too")
    typical = typical_windows(candidates, cost, limit, table.num_heads)[0]
    signal = SIGNALS[defaults.RECOMMENDED].with_options({"budget": str(typical.num_global)})
    sizes = [*sizes[:2], _passes(signal, model, ranking), *sizes[2:]]
    learned = measure(signal, ranking, typical.window, in_sequence(progress, sizes)[2])
    gates = [
        [round(float(gate), 4) for gate in layer_gates[:num_heads]]
        for layer_gates, num_heads in zip(learned.values, learned.heads_per_layer, strict=True)
    ]
    return table.with_record(head_gates=gates), sizes


def _cache_cost(
    model: PreTrainedModel, context: int, window: int, sinks: int
) -> tuple[CacheCost, int]:
    """Return the size of the KV cache of a model's layouts for one sequence, and the number of its KV heads."""
    with windows.full_attention(model) as states:
        heads = attention.heads_per_layer(states)
        sizes = [state.head_dim for state in states]
        layers = config_layers([state.native_window for state in states])
    facts = cache_facts(layers, heads, sizes)
    dtype = device.dtype_name(model.dtype)
    return CacheCost(context, 1, window, dtype=dtype, sinks=sinks, **facts), sum(heads)


def _contest(
    model: PreTrainedModel, blocks: TokenBlocks, entrants: Sequence[Entrant], progress: Progress
) -> Contest:
    """Compare layouts with as many blocks in a pass as fit in memory."""
    size = micro_batch.fitting_batch(model, blocks)
    return run_contest(model, blocks, entrants, batch_size=size, progress=progress)


def _entrants(
    table: HeadScores, cost: CacheCost, limit: int, candidates: Sequence[TriedWindow]
) -> list[Entrant]:
    """Return the layouts to compare within ``limit`` bytes.

    With costs of windows they are ``rival_layouts``; without, the highest-scoring heads at each of ``candidates``.
    """
    if table.window_costs is not None:
        layouts = rival_layouts(table, cost, limit)
    else:
        layouts = {f"{ONE_WINDOW}{row.window}": one_window_layout(table, row) for row in candidates}
    return [
        Entrant(name, layout, predicted_loss(table, layout)) for name, layout in layouts.items()
    ]


def cost_blocks(block_size: int) -> int:
    """Return the blocks of a text that costs of windows and their check take."""
    return window_costs.usual_blocks(block_size) + prediction_check.usual_blocks(block_size)


def selection_tokens(block_size: int) -> int:
    """Return the tokens of a text that select layouts at most: by costs of windows, their check and comparisons."""
    return cost_blocks(block_size) * block_size + most_tokens(block_size)


def half_of(blocks: TokenBlocks, num_blocks: int | None = None) -> TokenBlocks:
    """Return half of a text by documents, or a sample of it, so that a verdict can use the others.

    Args:
        blocks: the text, of which at most ``_LARGEST`` blocks are looked at.
        num_blocks: blocks of the sample; None: all.

    Raises ``UserError``: half of the documents are shorter than a block.
    """
    part = blocks.spread(_LARGEST)
    try:
        _, half = hold_out(part, part.tokens.size, 0.5)
    except UserError as error:
        raise UserError(
            "half the documents, without the longest, are less than a block of "
            f"{blocks.block_size} tokens: give more"
        ) from error
    return half if num_blocks is None else half.nested([min(num_blocks, half.num_blocks)])[0]
