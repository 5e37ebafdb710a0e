"""Probe: score every KV head by density or another signal, and write the table to ``probes/<name>/``."""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import replace
from typing import Any

from spkv_nas.artifacts import signals
from spkv_nas.artifacts.defaults import GAIN_TOKENS, PRICED_STEPS, SCORING_TOKENS
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.signals import RECOMMENDED
from spkv_nas.base.assets import EMBEDDED_PREFIX
from spkv_nas.base.distributed import on_main
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.version import environment
from spkv_nas.evaluation.micro_batch import fitting_batch, require_logits
from spkv_nas.evaluation.zero_shot import cache_folder
from spkv_nas.model.checkpoint import checkpoint_hash, model_origin, read_gates
from spkv_nas.model.model_shape import check_tokens, config_shape
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.model.windows import default_window
from spkv_nas.probing import density
from spkv_nas.probing.gains import LAYER, opening_gains
from spkv_nas.probing.priced import STEP_TOKENS, learn_gates
from spkv_nas.probing.signals import measure_signal
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.stages.checks import check
from spkv_nas.stages.options import ProbeOptions
from spkv_nas.stages.record import OPTIONS, recorded
from spkv_nas.stages.subject import Measured, Subject
from spkv_nas.stages.train.command import TrainOptions
from spkv_nas.stages.train.stage import train, train_dense_model
from spkv_nas.training.run_files import run_lock

_LEARNING = ("budget", "steps", "window", "seed")  # options that apply where gates are learned
_MOST_TARGET = 0.99  # maximum target density of learned gates


def probe(options: ProbeOptions, reporter: Reporter = SILENT) -> HeadScores:
    """Probe a recipe's reference (trained first if need be), a user's checkpoint, or the embedded reference.

    The default signal is density for a recipe or a model with gates, else the recommended one, head gates. To measure
    density on a model without gates, gates are learned first, at the budget's price and with frozen weights. Other
    signals append their name to the result's, and "layer" if they score whole layers.
    """
    check(options)
    quiet_transformers(reporter)
    options = replace(options, signal=chosen_signal(options))
    assert options.signal is not None
    signal_options = _signal_options(options, options.signal)
    subject = _subject(options, reporter)
    scores_layouts = options.signal in signals.SCORING  # other signals compute few logits
    measures_density = options.signal == signals.DENSITY
    measured = subject.load(
        reporter, with_logits=scores_layouts, tokens=SCORING_TOKENS if scores_layouts else None, learns=measures_density
    )
    if options.signal == signals.REGRESSION:
        root = options.folders.run_dir(subject.family) / "zero-shot"  # shared with searches
        signal_options["cache"] = on_main(lambda: cache_folder(root, measured.model, subject.source, measured.blocks))
    if scores_layouts:
        signal_options["batch_size"] = measured.batch_size
    # Learn gates
    learned: dict[str, Any] = {}
    if measured.train is not None:
        subject = _rename(subject, options)
        learned = _learn(subject, measured, options, reporter)
    elif measures_density and (unused := [name for name in _LEARNING if getattr(options, name) is not None]):
        raise UserError(f"--{unused[0]} is for a model that has yet to learn gates; {subject.source} has its own")
    # Measure the signal
    model_record = model_origin(subject.source) if options.recipe is None else {"model": subject.recipe.name}
    with reporter.bar("probing") as progress:
        probe_kwargs: dict[str, Any] = {
            "name": subject.name,
            "metadata": {
                **model_record,
                "data": measured.text,
                **measured.dtypes,
                **learned,
                OPTIONS: recorded(options),
                "environment": environment(),
            },
            "progress": progress,
        }
        if measures_density:
            table = density.probe(
                measured.model, measured.blocks, options.tau, batch_size=measured.batch_size, **probe_kwargs
            )
        else:
            table = measure_signal(
                options.signal, measured.model, measured.blocks, window=options.window, **signal_options, **probe_kwargs
            )
    # Write the table, then measure gains
    folder = options.folders.probe_dir(subject.name)
    on_main(lambda: table.write(folder))
    if measures_density and (table_with_gains := _add_gains(table, measured, options, reporter)) is not table:
        on_main(lambda: table_with_gains.write(folder))
        return table_with_gains
    return table


def _signal_options(options: ProbeOptions, signal: str) -> dict[str, Any]:
    """Return the options of particular signals. Raises ``UserError`` for one that this signal does not take."""
    names = ("steps", "granularity", "max_heads", "budget", "num_layouts", "seed")
    signal_options: dict[str, Any] = {name: getattr(options, name) for name in names}
    others = {"tau": options.tau, "window": options.window, "gain_tokens": options.gain_tokens}
    signals.check_options(signal, **others, **signal_options)
    return signal_options


def chosen_signal(options: ProbeOptions) -> str:
    """Return the options' signal, or the default: density with gates or a recipe, else head gates."""
    if options.signal is not None:
        return options.signal
    if options.recipe is not None:
        return signals.DENSITY
    has_gates = read_gates(Subject.of_command(options).source) is not None
    return signals.DENSITY if has_gates else RECOMMENDED


def _add_gains(table: HeadScores, measured: Measured, options: ProbeOptions, reporter: Reporter) -> HeadScores:
    """Add to a table the single-head gains that its ranking is judged by.

    The table is returned unchanged where the user switched gains off or they cannot be measured.
    """
    model, length = measured.model, measured.whole.block_size
    tokens = GAIN_TOKENS if options.gain_tokens is None else options.gain_tokens
    blocks = measured.whole.spread(max(1, tokens // length))
    if not tokens:
        return table
    assert table.window is not None
    try:
        check_tokens(model, blocks.largest_token)
        size = fitting_batch(model, blocks)
        on_main(lambda: require_logits(model, size, length))  # all ranks continue, or none
        with reporter.bar("judging the table") as progress:
            gains, gains_record = opening_gains(model, blocks, table.window, batch_size=size, progress=progress)
    except UserError as error:
        reporter.caution(f"how far the table can be trusted was not measured: {first_line(error)}")
        return table
    return replace(table, gains=gains, metadata={**table.metadata, "gains": gains_record})


def _rename(subject: Subject, options: ProbeOptions) -> Subject:
    """Rename results of embedded models so that they do not overwrite the reference's."""
    has_own_name = (
        options.name is not None or subject.name != subject.family or not subject.source.startswith(EMBEDDED_PREFIX)
    )
    return subject if has_own_name else replace(subject, name=f"{subject.name}-frozen")


def _learn(subject: Subject, measured: Measured, options: ProbeOptions, reporter: Reporter) -> dict[str, Any]:
    """Attach gates to a model, train them or load the finished ones, and return a record of their training."""
    model, blocks = measured.model, measured.train
    assert blocks is not None
    num_heads = math.prod(config_shape(model.config).grid)
    config = GateConfig(
        window=options.window or default_window(model, blocks.block_size),
        tau=GateConfig().tau if options.tau is None else options.tau,
        target_density=min(parse_budget(options.budget, num_heads) / num_heads, _MOST_TARGET),
    )
    schedule = {"steps": options.steps or PRICED_STEPS, "step_tokens": STEP_TOKENS, "seed": options.seed or 0}
    key_parts = [on_main(lambda: checkpoint_hash(subject.source)), str(model.dtype), config.model_dump(), schedule]
    key = hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode())
    blocks.feed(key)
    folder = options.folders.run_dir(subject.name) / f"gates-{key.hexdigest()[:12]}"
    start = time.perf_counter()
    with run_lock(folder, reporter.announce), reporter.bar("learning gates") as progress:
        learned = learn_gates(model, blocks, config, state=folder / "state", progress=progress, **schedule)
    reporter.reused(learned.resumed_at, learned.steps, "steps of the gates")
    if learned.resumed_at < learned.steps:
        reporter.announce(f"gates learned on {learned.tokens:,} tokens in {time.perf_counter() - start:.0f} s")
    return learned.as_mapping()


def _subject(options: ProbeOptions, reporter: Reporter) -> Subject:
    """Return the subject to probe.

    Of a recipe that is its reference, or its dense model for a signal that needs no gates; either is trained first.
    """
    if options.recipe is None:
        subject = Subject.of_command(options)
    else:
        training = TrainOptions(recipe=options.recipe, workspace=options.workspace, device=options.device)
        is_gated = options.signal == signals.DENSITY
        checkpoint = train(training, reporter).reference if is_gated else train_dense_model(training, reporter)
        subject = Subject.of_recipe(options, options.recipe, checkpoint)
    if options.name is None and options.signal != signals.DENSITY:
        suffix = f"{options.signal}-layer" if options.granularity == LAYER else options.signal
        return replace(subject, name=f"{subject.name}-{suffix}")
    return subject
