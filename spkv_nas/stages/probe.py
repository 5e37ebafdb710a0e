"""Probe: the density of every KV head, or another signal, to ``probes/<name>/``."""

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
from spkv_nas.evaluation.zero_shot import cache_folder
from spkv_nas.model.checkpoint import checkpoint_hash, model_origin, read_gates
from spkv_nas.model.model_shape import check_tokens, config_shape
from spkv_nas.model.windows import default_window
from spkv_nas.probing import density
from spkv_nas.probing.gains import LAYER, opening_gains
from spkv_nas.probing.priced import STEP_TOKENS, learn_gates
from spkv_nas.probing.signals import measure_signal
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.stages.checks import check
from spkv_nas.stages.common import (
    Measured,
    Subject,
    fitting_batch,
    quiet_transformers,
    require_logits,
)
from spkv_nas.stages.options import ProbeOptions, TrainOptions
from spkv_nas.stages.record import OPTIONS, recorded
from spkv_nas.stages.train import train, train_dense_model
from spkv_nas.training.run_files import run_lock

_LEARNING = ("budget", "steps", "window", "seed")
_MOST_TARGET = 0.99  # of the density that a price keeps


def probe(options: ProbeOptions, reporter: Reporter = SILENT) -> HeadScores:
    """Probe a recipe's reference (trained first if need be), a checkpoint of one's own, or the embedded reference.

    Without a signal: the density of gates, and the recommended signal, head gates, of a checkpoint without. For its
    density such a checkpoint learns gates first, at the price of the budget: of the model no weight moves.
    A signal other than density needs no gates; it is written under the name with the signal's behind it, one of whole
    layers with "layer" behind that.
    """
    check(options)
    quiet_transformers(reporter)
    options = replace(options, signal=chosen_signal(options))
    assert options.signal is not None
    own = _checked(options, options.signal)
    subject = _subject(options, reporter)
    scores = options.signal in signals.SCORING  # others make logits of a few tokens at most
    measures_density = options.signal == signals.DENSITY
    measured = subject.load(
        reporter, with_logits=scores, tokens=SCORING_TOKENS if scores else None, learns=measures_density
    )
    if options.signal == signals.REGRESSION:
        root = options.place.run_dir(subject.family) / "zero-shot"  # where a search has its scores
        own["cache"] = on_main(lambda: cache_folder(root, measured.model, subject.source, measured.blocks))
    if scores:
        own["batch_size"] = measured.batch_size
    learned: dict[str, Any] = {}
    if measured.train is not None:
        subject = _renamed(subject, options)
        learned = _learn(subject, measured, options, reporter)
    elif measures_density and (given_for := [name for name in _LEARNING if getattr(options, name) is not None]):
        raise UserError(f"--{given_for[0]} is for a model that has yet to learn gates; {subject.source} has its own")
    source = model_origin(subject.source) if options.recipe is None else {"model": subject.recipe.name}
    with reporter.bar("probing") as progress:
        told: dict[str, Any] = {
            "name": subject.name,
            "metadata": {
                **source,
                "data": measured.text,
                **measured.dtypes,
                **learned,
                OPTIONS: recorded(options),
                "environment": environment(),
            },
            "progress": progress,
        }
        if measures_density:
            table = density.probe(measured.model, measured.blocks, options.tau, batch_size=measured.batch_size, **told)
        else:
            table = measure_signal(
                options.signal, measured.model, measured.blocks, window=options.window, **own, **told
            )
    folder = options.place.probe_dir(subject.name)
    on_main(lambda: table.write(folder))
    if measures_density and (judged := _with_gains(table, measured, options, reporter)) is not table:
        on_main(lambda: judged.write(folder))
        return judged
    return table


def _checked(options: ProbeOptions, signal: str) -> dict[str, Any]:
    """The options that some signals alone take. Raises ``UserError`` for one that this signal does not take."""
    names = ("steps", "granularity", "max_heads", "budget", "num_layouts", "seed")
    signal_options: dict[str, Any] = {name: getattr(options, name) for name in names}
    others = {"tau": options.tau, "window": options.window, "gain_tokens": options.gain_tokens}
    signals.check_options(signal, **others, **signal_options)
    return signal_options


def chosen_signal(options: ProbeOptions) -> str:
    """The signal of the options, or the default: density of gates, and head gates of a model without."""
    if options.signal is not None:
        return options.signal
    if options.recipe is not None:
        return signals.DENSITY
    has_gates = read_gates(Subject.of_command(options).source) is not None
    return signals.DENSITY if has_gates else RECOMMENDED


def _with_gains(table: HeadScores, measured: Measured, options: ProbeOptions, reporter: Reporter) -> HeadScores:
    """The table with the gains that it is judged by; as it is where they are not wanted, or cannot be measured."""
    model, length = measured.model, measured.whole.block_size
    tokens = GAIN_TOKENS if options.gain_tokens is None else options.gain_tokens
    blocks = measured.whole.spread(max(1, tokens // length))
    if not tokens:
        return table
    assert table.window is not None
    try:
        check_tokens(model, blocks.largest_token)
        size = fitting_batch(model, blocks)
        on_main(lambda: require_logits(model, size, length))  # so that all processes go on, or none
        with reporter.bar("judging the table") as progress:
            gains, took = opening_gains(model, blocks, table.window, batch_size=size, progress=progress)
    except UserError as error:
        reporter.caution(f"how far the table can be trusted was not measured: {first_line(error)}")
        return table
    return replace(table, gains=gains, metadata={**table.metadata, "gains": took})


def _renamed(subject: Subject, options: ProbeOptions) -> Subject:
    """Of embedded models under a name that is not the reference's."""
    own = options.name is not None or subject.name != subject.family or not subject.source.startswith(EMBEDDED_PREFIX)
    return subject if own else replace(subject, name=f"{subject.name}-frozen")


def _learn(subject: Subject, measured: Measured, options: ProbeOptions, reporter: Reporter) -> dict[str, Any]:
    """Put gates on a model without, and have them learn or read what they learned before; what it took."""
    model, blocks = measured.model, measured.train
    assert blocks is not None
    num_heads = math.prod(config_shape(model.config).grid)
    config = GateConfig(
        window=options.window or default_window(model, blocks.block_size),
        tau=GateConfig().tau if options.tau is None else options.tau,
        target_density=min(parse_budget(options.budget, num_heads) / num_heads, _MOST_TARGET),
    )
    how = {"steps": options.steps or PRICED_STEPS, "step_tokens": STEP_TOKENS, "seed": options.seed or 0}
    parts = [on_main(lambda: checkpoint_hash(subject.source)), str(model.dtype), config.model_dump(), how]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    blocks.feed(key)
    folder = options.place.run_dir(subject.name) / f"gates-{key.hexdigest()[:12]}"
    start = time.perf_counter()
    with run_lock(folder, reporter.announce), reporter.bar("learning gates") as progress:
        learned = learn_gates(model, blocks, config, state=folder / "state", progress=progress, **how)
    reporter.reused(learned.resumed_at, learned.steps, "steps of the gates")
    if learned.resumed_at < learned.steps:
        reporter.announce(f"gates learned on {learned.tokens:,} tokens in {time.perf_counter() - start:.0f} s")
    return learned.as_mapping()


def _subject(options: ProbeOptions, reporter: Reporter) -> Subject:
    """What is probed; of a recipe its reference, or for a signal that needs no gates its dense model, trained first."""
    if options.recipe is None:
        subject = Subject.of_command(options)
    else:
        training = TrainOptions(recipe=options.recipe, workspace=options.workspace, device=options.device)
        is_gated = options.signal == signals.DENSITY
        checkpoint = train(training, reporter).reference if is_gated else train_dense_model(training, reporter)
        subject = Subject.of_recipe(options, options.recipe, checkpoint)
    if options.name is None and options.signal != signals.DENSITY:
        what = f"{options.signal}-layer" if options.granularity == LAYER else options.signal
        return replace(subject, name=f"{subject.name}-{what}")
    return subject
