"""Probe: score every KV head by density or another signal, and write the table to ``probes/<name>/``."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from spkv_nas.artifacts import diagnosis, gate_config, grid, kinds, result_tables
from spkv_nas.artifacts.defaults import (
    ABLATION_TOKENS,
    FROZEN_STEP_PASSES,
    LEARNING_TOKENS,
    PRICED_STEPS,
    SCORING_TOKENS,
    STRONG_SINK,
)
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.tried_layouts import FAR_ERRORS, RECOMMENDED, TRIED, TriedLayout
from spkv_nas.base import progress
from spkv_nas.base.assets import EMBEDDED_PREFIX
from spkv_nas.base.console import Table, caution, escape, out, say
from spkv_nas.base.distributed import on_main
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.version import environment
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation import alarms, micro_batch
from spkv_nas.evaluation.zero_shot import cache_folder
from spkv_nas.model import model_shape, windows
from spkv_nas.model.checkpoint import checkpoint_hash, model_origin
from spkv_nas.probing import measure, priced, signals
from spkv_nas.probing.gains import add_one_head_gains
from spkv_nas.probing.signals import Signal, parse_sinks
from spkv_nas.probing.sinks import choose_sinks
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.stages import checks, commands, next_steps, printing
from spkv_nas.stages.options import REFERENCE
from spkv_nas.stages.options.probe import ProbeOptions, chosen_signal
from spkv_nas.stages.record import OPTIONS, probe_records, recorded
from spkv_nas.stages.subject import Measured, Subject

_LEARNING = ("budget", "steps", "window", "seed")  # options that apply where gates are learned
_GAINS = "ablation_tokens"  # option of signals whose ranking is validated
# Entries of the record in the JSON
_SHOWN = (
    "sink_mass",
    "massive_activation",
    "memory",
    TRIED,
    RECOMMENDED,
    "prediction_check",
    "alarm",
)
# Titles of bars
_LEARNING_GATES = "learning gates"
_PROBING = "probing"
_VALIDATING = "validating the ranking"
_MAX_TARGET = 0.99  # maximum target density of learned gates


def probe(
    options: ProbeOptions,
    reporter: Reporter = SILENT,
    *,
    is_step: bool = False,
    compares: int | None = None,
    tell_unseen: Callable[[int], None] | None = None,
) -> HeadScores:
    """Probe a recipe's reference (trained first if need be), a user's checkpoint, or the embedded reference.

    The default signal is density for a recipe or a model with gates, else head gates. To measure density on a model
    without gates, gates are learned first, at the budget's price and with frozen weights. As a step of ``auto``, it
    returns the table of an earlier probe of the same inputs by this version, if there is one, and raises ``UserError``
    if the text has too few documents to leave some unseen; ``tell_unseen`` is called with the tokens of these. If a
    later step ``compares`` on so many tokens at most, no more of the text is read than both take.
    """
    checks.check(options)
    signal = chosen_signal(options)
    options = replace(options, signal=signal.name)
    # Load the model and the text
    subject = _subject(options, reporter).reading(compares)
    measured = _load(subject, signal, options, reporter, is_step=is_step, tell_unseen=tell_unseen)
    origin = _origin(subject, measured, options, reporter)
    run_options = _run_options(signal, subject, measured, options)
    _expect(signal, measured, options, reporter)
    # Learn gates
    learned = dict[str, Any]()
    sinks = parse_sinks(options.sinks)
    if measured.train is not None:
        subject = _learned_name(subject, options)
        learned = _learn(subject, measured, options, reporter)
        sinks = learned.get("sinks", 0)  # those that the gates keep
    elif signal.needs_gates:
        _refuse_learning_options(options, subject.source)
    # Measure the signal, under a name that no table of other inputs has
    inputs = on_main(lambda: _inputs(subject, measured, options))
    name = on_main(lambda: _free_name(options.folders, subject.name, inputs, reporter))
    folder = options.folders.probe_dir(name)
    earlier = probe_records(options.folders).get(name)
    if is_step and earlier is not None and earlier.environment == environment():
        return _reused(folder, reporter)
    metadata = {**origin, **learned, **_record(options, inputs)}
    with reporter.bar(_PROBING, _unit(signal)) as bar:
        table = measure.measure_signal(
            signal,
            measured.model,
            measured.blocks,
            window=options.window,
            sinks=sinks,
            name=name,
            metadata=metadata,
            progress=bar,
            **run_options,
        )
    if measured.train is not None:
        table = replace(table, selected_on=measured.blocks.text_ids | measured.train.text_ids)
    on_main(lambda: table.write(folder))
    if _GAINS not in signal.options():
        return table
    return _with_gains(table, measured, options, folder, reporter)


def _load(
    subject: Subject,
    signal: Signal,
    options: ProbeOptions,
    reporter: Reporter,
    *,
    is_step: bool,
    tell_unseen: Callable[[int], None] | None,
) -> Measured:
    """Load the model and the text, half of which costs of windows leave unseen."""
    measured = subject.load(
        reporter,
        with_logits=signal.computes_logits,
        tokens=SCORING_TOKENS if signal.computes_logits else None,
        learns=signal.needs_gates,
    )
    if signal.name != signals.WINDOW_COSTS.name or options.max_tokens is not None:
        return measured
    measured = _half(measured, options, reporter, is_needed=is_step)
    if tell_unseen is not None:
        tell_unseen(measured.whole.tokens.size - measured.blocks.tokens.size)
    return measured


def _refuse_learning_options(options: ProbeOptions, source: str) -> None:
    """Raise ``UserError`` if an option of learning gates is given for a model that has gates."""
    for name in _LEARNING:
        if getattr(options, name) is not None:
            raise UserError(
                f"--{name} has no effect, because {source} has gates already: remove it"
            )


def _record(options: ProbeOptions, inputs: str) -> dict[str, Any]:
    """Return the record of the options, the versions of libraries, and the hash of the inputs."""
    return {OPTIONS: recorded(options), "environment": environment(), "inputs": inputs}


def _reused(folder: Path, reporter: Reporter) -> HeadScores:
    """Return the table of an earlier probe, and repeat the warning if its costs of windows are no guide."""
    table = HeadScores.read(folder)
    reporter.announce(f"reused probe {table.name} of the same model, text and options")
    check = table.record.check
    reporter.caution(check.sentence if check is not None and check.has_failed else None)
    return table


def _with_gains(
    table: HeadScores, measured: Measured, options: ProbeOptions, folder: Path, reporter: Reporter
) -> HeadScores:
    """Return a table with the single-head gains that judge its ranking, and write it again if it has any."""
    with_gains = _add_gains(table, measured, options, reporter)
    if with_gains is not table:
        on_main(lambda: with_gains.write(folder))
    return with_gains


def _expect(signal: Signal, measured: Measured, options: ProbeOptions, reporter: Reporter) -> None:
    """Say how much work the steps are going to be, in passes of a token, so that the time left is that of all."""
    blocks = measured.blocks
    grid = model_shape.config_shape(measured.model.config).grid
    length = blocks.block_size
    # Learn gates
    if measured.train is not None:
        steps = options.steps or PRICED_STEPS
        learning = steps * LEARNING_TOKENS * FROZEN_STEP_PASSES
        reporter.expect(_LEARNING_GATES, learning, progress.GRADIENT)
    # Measure the signal, and compare layouts after it
    work = signal.work(grid, blocks.tokens.size, length)
    chooses_window = options.memory is not None and options.window is None
    following = measure.passes_after(signal, blocks, has_memory=chooses_window)
    probing = work.passes * work.tokens * work.effort + following * length
    unit = progress.FORWARD if work.effort == 1.0 else progress.GRADIENT
    reporter.expect(_PROBING, probing, unit)
    # Validate the ranking
    tokens = ABLATION_TOKENS if options.ablation_tokens is None else options.ablation_tokens
    if _GAINS in signal.options() and tokens:
        num_blocks = max(1, min(tokens // length, measured.whole.num_blocks))
        reporter.expect(_VALIDATING, signals.ablation_passes(grid) * num_blocks * length)


def _unit(signal: Signal) -> str:
    """Return what the progress of measuring a signal counts."""
    return "steps" if "steps" in signal.options() and not signal.needs_gates else "blocks"


def _learned_name(subject: Subject, options: ProbeOptions) -> Subject:
    """Return a subject whose learned gates get another name than the embedded reference's own densities."""
    has_own_name = options.name is not None or subject.name != subject.family
    if has_own_name or not subject.source.startswith(EMBEDDED_PREFIX):
        return subject
    return replace(subject, name=f"{subject.name}-frozen")


def _run_options(
    signal: Signal, subject: Subject, measured: Measured, options: ProbeOptions
) -> dict[str, Any]:
    """Return what a signal uses: a limit of memory, a cache of scores, a batch size."""
    run_options: dict[str, Any] = {"memory": options.memory}
    if signal.caches_scores:
        root = options.folders.run_dir(subject.family) / "zero-shot"  # shared with searches
        run_options["cache"] = on_main(
            lambda: cache_folder(root, measured.model, subject.source, measured.blocks)
        )
    if signal.computes_logits or signal.needs_gates:
        run_options["batch_size"] = measured.batch_size
    return run_options


def _half(
    measured: Measured, options: ProbeOptions, reporter: Reporter, *, is_needed: bool
) -> Measured:
    """Leave half of the documents unseen, for verdicts on the same text; few blocks are enough for costs of windows."""
    whole = measured.blocks
    most = measure.cost_blocks(whole.block_size) if options.memory is None else None
    try:
        part = measure.half_of(whole, most)
    except UserError:
        if is_needed:
            raise
        reporter.caution(
            "too few documents to leave some unseen: score and verdict need other text"
        )
        return measured
    seen = len(part.text_ids)
    unseen = len(whole.text_ids) - seen
    reporter.announce(
        f"{seen:,} documents select the heads; {unseen:,} others are left for score and verdict"
    )
    return replace(measured, blocks=part)


def _inputs(subject: Subject, measured: Measured, options: ProbeOptions) -> str:
    """Return 8 hexadecimal digits of what a table is made from: model, dtype, text, and options."""
    # The model and the text are hashed by their content, not by their places
    places = ("model", "data", "recipe", "name")
    settings = {key: value for key, value in recorded(options).items() if key not in places}
    parts = [checkpoint_hash(subject.source), str(measured.model.dtype), settings]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for blocks in (measured.blocks, measured.train):
        if blocks is not None:
            blocks.feed(key)
    return key.hexdigest()[:8]


def _free_name(workspace: Workspace, name: str, inputs: str, reporter: Reporter) -> str:
    """Return the first of NAME, NAME-2, NAME-3, ... that no probe has, or one of the same inputs, which is replaced."""
    records = probe_records(workspace)
    for number in count(1):
        free = name if number == 1 else f"{name}-{number}"
        if free not in records or records[free].inputs == inputs:
            break
    if free != name and records[name].model_fields_set:
        reporter.announce(
            f"probe '{name}' was measured on another model or text, "
            "or with other options, and is kept; this one is "
            f"called '{free}'"
        )
    elif free != name:
        folder = workspace.probe_dir(name)
        reporter.caution(
            f"probe '{name}' has no readable record and is kept ({folder}); "
            f"this one is called '{free}'"
        )
    return free


def _origin(
    subject: Subject, measured: Measured, options: ProbeOptions, reporter: Reporter
) -> dict[str, Any]:
    """Return the record of the model and the text, with a warning if the model does not know the text."""
    model = measured.model
    window = options.window or windows.default_window(model, measured.whole.block_size)
    with reporter.bar("checking the text"):
        _, text_alarm = alarms.check_text(model, measured.whole, window, measured.separator)
    origin: dict[str, Any] = {"model": subject.recipe.name}
    if options.recipe is None:
        origin = model_origin(subject.source)
    origin["data"] = measured.text
    origin |= measured.dtypes
    origin["separator"] = measured.separator.as_mapping()
    if text_alarm is not None:
        origin[result_tables.ALARM] = text_alarm
    return origin


def _add_gains(
    table: HeadScores, measured: Measured, options: ProbeOptions, reporter: Reporter
) -> HeadScores:
    """Add the single-head gains that judge a table's ranking, unless switched off or not measurable."""
    # Sample the text
    model = measured.model
    length = measured.whole.block_size
    tokens = ABLATION_TOKENS if options.ablation_tokens is None else options.ablation_tokens
    blocks = measured.whole.spread(max(1, tokens // length))
    if not tokens:
        return table
    assert table.window is not None
    # Measure each head alone; if that is impossible, the ranking is not validated
    try:
        model_shape.check_tokens(model, blocks.largest_token)
        size = micro_batch.fitting_batch(model, blocks)
        # All ranks continue, or none
        on_main(lambda: micro_batch.require_logits(model, size, length))
        with reporter.bar(_VALIDATING, "blocks") as bar:
            gains, gains_record = add_one_head_gains(
                model, blocks, table.window, sinks=table.sinks, batch_size=size, progress=bar
            )
    except UserError as error:
        reporter.caution(f"the ranking was not validated: {first_line(error)}")
        return table
    # Record the documents of both texts as used for selection
    documents = (table.selected_on or frozenset()) | blocks.text_ids
    return replace(table.with_record(gains=gains_record), gains=gains, selected_on=documents)


def _learn(
    subject: Subject, measured: Measured, options: ProbeOptions, reporter: Reporter
) -> dict[str, Any]:
    """Attach gates to a model, train them or load the finished ones, and return a record of their training."""
    # Imports what trains, for a second or two that other probes do not need
    from spkv_nas.training.run_files import run_lock

    model = measured.model
    blocks = measured.train
    assert blocks is not None
    num_heads = sum(model_shape.config_shape(model.config).heads_per_layer)
    # Choose the window, the sink tokens and the target density
    window = options.window or windows.default_window(model, blocks.block_size)
    sinks = parse_sinks(options.sinks)
    sink_facts: Mapping[str, Any] = {}
    if sinks is None:
        sinks, sink_facts = choose_sinks(model, blocks, window)
    share = parse_budget(options.budget, num_heads) / num_heads
    config = gate_config.GateConfig(
        window=window,
        sinks=sinks,
        tau=gate_config.GateConfig().tau if options.tau is None else options.tau,
        target_density=min(share, _MAX_TARGET),
    )
    # Name the run by everything that its gates depend on
    steps = options.steps or PRICED_STEPS
    seed = options.seed or 0
    key_parts = [
        on_main(lambda: checkpoint_hash(subject.source)),
        str(model.dtype),
        config.model_dump(),
        {"steps": steps, "step_tokens": LEARNING_TOKENS, "seed": seed},
    ]
    key = hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode())
    blocks.feed(key)
    folder = options.folders.run_dir(subject.name) / f"gates-{key.hexdigest()[:12]}"
    # Train or resume
    start = time.perf_counter()
    with run_lock(folder, reporter.announce), reporter.bar(_LEARNING_GATES, "steps") as bar:
        learned = priced.learn_gates(
            model,
            blocks,
            config,
            steps=steps,
            step_tokens=LEARNING_TOKENS,
            seed=seed,
            state=folder / "state",
            progress=bar,
        )
    reporter.reused(learned.resumed_at, learned.steps, "gate training steps")
    if learned.resumed_at < learned.steps:
        seconds = time.perf_counter() - start
        reporter.announce(f"trained gates on {learned.tokens:,} tokens in {seconds:.0f} s")
    facts = learned.as_mapping()
    if sinks:
        facts |= {"sinks": sinks, **sink_facts}
    return facts


def _subject(options: ProbeOptions, reporter: Reporter) -> Subject:
    """Return the subject to probe; of a recipe its reference, or for signals without gates its dense model, trained."""
    # Train the model of a recipe, or take the checkpoint
    if options.recipe is None:
        subject = Subject.of(options, REFERENCE, "probe on")
    else:
        # Imports what trains, as above
        from spkv_nas.stages import reference_run

        recipe = options.recipe
        folders = options.folders
        device = options.device
        if signals.SIGNALS[str(options.signal)].needs_gates:
            trained = reference_run.train_reference(
                recipe, folders, device=device, reporter=reporter
            )
            checkpoint = trained.reference
        else:
            checkpoint = reference_run.train_dense(
                recipe, folders, device=device, reporter=reporter
            )
        subject = Subject.of_recipe(options, options.recipe, checkpoint)
    subject = replace(subject, given_separator=options.separator)
    # Name the probe after its signal, unless that is density
    if options.name is None and options.signal != signals.DENSITY.name:
        suffix = f"{options.signal}-layer" if options.granularity == kinds.LAYER else options.signal
        return replace(subject, name=f"{subject.name}-{suffix}")
    return subject


def show(table: HeadScores) -> None:
    """Print a probe's mean score, its highest head, and its warnings."""
    printing.show_alarm(table.record.alarm)
    # Print the mean and the highest score
    out.print(_summary(table))
    tried = table.record.tried
    if tried:
        out.print(_layouts_tried(tried, table.record))
        say(
            f"recommended: {table.record.recommended}; fewer windows are preferred if both losses "
            "are within one standard error"
        )
        caution(_about_predictions(tried))
    check = table.record.check
    if check is not None and not check.has_failed:  # a failure was said at once
        say(check.sentence)
    # Print remarks and warnings
    say(_about_sinks(table))
    say(diagnosis.about_small_domains(table.rows))
    for line in table.diagnosis():
        caution(line)


def _summary(table: HeadScores) -> str:
    """Return a line on the mean score, its spread and the highest head."""
    heads = grid.grid_words(table.heads_per_layer)
    score, layer, head = max(
        (table.density[layer, head], layer, head) for layer, head in np.argwhere(table.is_head)
    )
    if table.is_density:
        measured = f"tau {table.tau:g}: density mean {table.mean:.3f}, std {table.std:.3f}"
        highest = f"{score:.2f}"
    else:
        measured = f"{table.signal} mean {table.mean:.3g}, std {table.std:.3g}"
        highest = f"{score:.3g}"
    return (
        f"[bold]{escape(table.name)}[/bold]: {heads}, {measured}; "
        f"highest is layer {layer}, head {head} ({highest})"
    )


def _layouts_tried(tried: Sequence[TriedLayout], record: ProbeRecord) -> Table:
    """Return the layouts that were compared within a limit of memory, the recommended one in bold."""
    measured = f"measured without training at {record.block_size:,} tokens"
    title = f"layouts of this memory, {measured}, on documents that ranked no head"
    columns = ("layout", "global heads", "windows", "predicted %", "measured ΔNLL %", "blocks")
    printed = Table(*columns, box=None, title=title)
    for row in tried:
        predicted = "-" if math.isnan(row.predicted) else f"{row.predicted:+.2f}"
        measured = printing.change(row.change, row.standard_error)
        cells = (row.name, row.layout.num_global, row.layout.reach, predicted, measured, row.blocks)
        printed.add_row(*map(str, cells), style="bold" if row.name == record.recommended else None)
    return printed


def _about_predictions(tried: Sequence[TriedLayout]) -> str | None:
    """Return a warning where layouts were predicted to lose much more or less than they lost; None without one."""
    missed = [row.name for row in tried if row.is_far_off]
    if not missed:
        return None
    return (
        f"the costs of windows are wrong about {', '.join(missed)}, "
        f"by more than {FAR_ERRORS:g} standard errors: "
        "compare layouts by what was measured"
    )


def _about_sinks(table: HeadScores) -> str | None:
    """Return a sentence on the measured attention sinks and the sink tokens of layouts; None without either."""
    sink_tokens = f"{table.sinks or 'no'} sink token{'' if table.sinks == 1 else 's'}"
    record = table.record
    if record.sink_mass is None:
        return f"layouts get {sink_tokens}" if table.sinks else None
    # The attention on the tokens that layouts get, or on the first, and the heads that were measured
    share = 100 * (record.sink_mass if record.sink_tokens_mass is None else record.sink_tokens_mass)
    first = "first token" if table.sinks < 2 else f"first {table.sinks} tokens"
    among = f"{record.measured_heads} heads"
    if record.measured_heads != table.num_heads:
        among += " without a native sliding window"
    sentence = (
        f"{share:.{0 if share >= 10 else 1}f} % of attention is on the {first}; "
        f"{record.sink_heads} of {among} give the first four more than {100 * STRONG_SINK:.0f} %: "
        f"layouts get {sink_tokens}"
    )
    # The massive activation that sinks come with
    massive = record.massive_activation
    if massive is None:
        return sentence
    return (
        f"{sentence}\n"
        f"largest activation: {massive.ratio:,.0f} times the layer's median (layer "
        f"{massive.layer}, channel {massive.channel}, token {massive.position})"
    )


def document(table: HeadScores, folder: Path) -> dict[str, Any]:
    """Return a probe's mean over heads and the scores of every head."""
    entries = table.record.entries()
    return {
        **printing.identification(table),
        "mean": table.mean,
        "standard_deviation": table.std,
        "sinks": table.sinks,
        **{key: entries.get(key) for key in _SHOWN},
        "diagnosis": table.diagnosis(),
        "heads": table.rows,
        "folder": folder,
    }


def run(options: ProbeOptions, reporter: Reporter) -> commands.Result:
    """Run the command."""
    table = probe(options, reporter)
    folder = options.folders.probe_dir(table.name)
    following: Sequence[commands.Suggestion] = ()
    if table.record.alarm is None:
        following = next_steps.after_probe(options, table)
    return commands.Result(table, show, partial(document, folder=folder), next=following)
