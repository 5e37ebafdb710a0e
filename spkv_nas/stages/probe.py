"""Probe: the density of every KV head, or another signal, to ``probes/<name>/``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spkv_nas.artifacts.density import DensityTable
from spkv_nas.base.errors import UserError
from spkv_nas.base.names import check_name
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.version import environment
from spkv_nas.evaluation.zero_shot import cache_folder
from spkv_nas.probing import density, signals
from spkv_nas.probing.gains import LAYER
from spkv_nas.stages.common import Subject, check_tau, quiet_transformers
from spkv_nas.stages.options import REFERENCE, ProbeOptions, TrainOptions
from spkv_nas.stages.train import train


def probe(options: ProbeOptions, reporter: Reporter = SILENT) -> DensityTable:
    """Probe a recipe's reference (trained first if need be), a checkpoint of one's own, or the embedded reference.

    A signal other than density needs no gates; it is written under the name with the signal's behind it, one of whole
    layers with "layer" behind that.
    """
    quiet_transformers(reporter)
    given = ("steps", "granularity", "budget", "num_layouts", "seed")
    own: dict[str, Any] = {name: getattr(options, name) for name in given}
    signals.check_options(options.signal, tau=options.tau, window=options.window, **own)
    if options.recipe is not None and (options.model is not None or options.data):
        raise UserError("give a recipe, or --model with --data, not both: a recipe says its own model and text")
    check_tau(options.tau)
    if options.name is not None:
        check_name(options.name, "the name")  # before a recipe is trained
    subject = _subject(options, reporter)
    scores = options.signal in signals.SCORING  # others make logits of a few tokens at most
    measured = subject.load(reporter, with_logits=scores, tokens=signals.SCORING_TOKENS if scores else None)
    if options.signal == signals.REGRESSION:
        root = options.place.run_dir(subject.family) / "zero-shot"  # where a search has its scores
        own["cache"] = cache_folder(root, measured.model, subject.source, measured.blocks)
    source = subject.source if options.recipe is None else subject.recipe.name
    with reporter.bar("probing") as progress:
        told: dict[str, Any] = {
            "name": subject.name,
            "metadata": {"model": source, "data": measured.text, **measured.dtypes, "environment": environment()},
            "progress": progress,
        }
        if options.signal == signals.DENSITY:
            table = density.probe(measured.model, measured.blocks, options.tau, **told)
        else:
            table = signals.measure_signal(
                options.signal, measured.model, measured.blocks, window=options.window, **own, **told
            )
    table.write(options.place.probe_dir(subject.name))
    return table


def _subject(options: ProbeOptions, reporter: Reporter) -> Subject:
    """What is probed; the reference of a recipe is trained first."""
    if options.recipe is None:
        subject = Subject.of(options, REFERENCE, "probe on")
        options.place.check_writable()
    else:
        trained = train(
            TrainOptions(recipe=options.recipe, workspace=options.workspace, device=options.device), reporter
        )
        subject = Subject.of_recipe(options, options.recipe, trained.reference)
    if options.name is None and options.signal != signals.DENSITY:
        what = f"{options.signal}-layer" if options.granularity == LAYER else options.signal
        return replace(subject, name=f"{subject.name}-{what}")
    return subject
