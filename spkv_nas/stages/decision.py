"""Prepare the samples of ``verdict`` and ``critical-budget``, and make what their records and tables share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from rich.text import Text
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import Measurement, loss_text, measurements
from spkv_nas.artifacts.selection import Selection
from spkv_nas.base import console, device, progress
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import alarms, micro_batch, zero_shot
from spkv_nas.evaluation.selected import Selected, find_selected, probe_of, recorded_reading
from spkv_nas.evaluation.separators import SeparatorReport
from spkv_nas.evaluation.verdict import criteria, criterion
from spkv_nas.evaluation.verdict.contenders import Contender, ScoreStore
from spkv_nas.evaluation.verdict.trial import Outcome, Trial, contest_text, text_in_random_order
from spkv_nas.model import checkpoint, windows
from spkv_nas.stages.context import choose_context
from spkv_nas.stages.options import DENSE
from spkv_nas.stages.options.verdict import DecisionOptions, reads_text
from spkv_nas.stages.subject import Loaded, Subject, load

SEED = 0  # of the random order of samples
EXIT_CODES = {"passes": 0, "fails": 1, "open": 3}
LOSS_COLUMNS = ("criterion", "loss", "interval", "margin", "samples")  # of ``loss_cells``


@dataclass(frozen=True)
class Compared:
    """Candidates to compare with a dense model, on samples without the documents that a candidate was selected on.

    ``num_left_out`` counts these in the text; None: no criterion reads text. ``memory`` is each layout's KV cache at
    ``context`` tokens, as a share of full attention's, by name; without candidates of another size than the model.
    """

    name: str
    against: str
    candidates: Sequence[Contender]
    trial: Trial
    selected: Selected
    num_left_out: int | None
    context: int
    memory: Mapping[str, float]


def prepare(
    options: DecisionOptions,
    candidates: Sequence[Contender],
    files: Sequence[Path],
    reporter: progress.Reporter,
    *,
    ranked_on: Selection | None = None,
) -> Compared:
    """Load the dense model, and the documents that no candidate was selected on; prepare the samples of each criterion.

    ``ranked_on`` are the documents that ranked the heads, if layouts of one budget are to be compared on other ones
    (``Trial.contest``). They alone decide which: the same command compares on the same documents again, although its
    layouts were selected on these by then. Beside the layout files there may be documents that layouts were selected
    on. Raises ``UserError`` if a layout was selected on all documents of the text, or something cannot be read.
    """
    # Check the criteria, and load the dense model
    margins = criteria.parse_margins(options.margin)
    subject = Subject.of(options, DENSE, "compare on", reads_text=reads_text(margins))
    model, tokenizer = load(options, options.model, reporter)
    # Read the documents that no candidate was selected on
    layouts = {each.name: each.chosen for each in candidates if each.chosen is not None}
    separator, documents = recorded_reading(layouts.values())
    subject = replace(subject, given_separator=separator, documents=options.documents or documents)
    # Comparisons of layouts take documents besides those of the samples
    if ranked_on is not None:
        subject = subject.reading(options.max_tokens)
    text = None
    num_left_out = None
    circumstances = None
    contest = None
    selected = Selected()
    if reads_text(margins):
        selected = find_selected(options.folders, layouts, near=files, with_equal=ranked_on is None)
        whole, report = _whole(options, subject, (model, tokenizer), reporter)
        contest = None if ranked_on is None else contest_text(whole, ranked_on)
        if contest is not None:
            selected = selected.with_contest(contest.text_ids)
        num_left_out = selected.count(whole)
        text, circumstances = _text(options, model, whole, report, selected, reporter)
    # Prepare the samples of every criterion
    store = _store(options, subject, model, text, reporter)
    setting = _setting(options, (model, tokenizer), text, reporter)
    trial = Trial.of(margins, setting, store, circumstances, contest)
    name = options.name or probe_of(options.folders, layouts.values()) or subject.name
    positions = checkpoint.read_size(options.model).positions
    context = choose_context(None, positions) if text is None else text.block_size
    return Compared(
        name=name,
        against=options.model,
        candidates=candidates,
        trial=trial,
        selected=selected,
        num_left_out=num_left_out,
        context=context,
        memory=_cache_shares(options, model, layouts, context),
    )


def _cache_shares(
    options: DecisionOptions, model: PreTrainedModel, layouts: Mapping[str, Layout], context: int
) -> dict[str, float]:
    """Return the KV cache of layouts as a share of full attention's, without those for models of another size."""
    heads = checkpoint.read_size(options.model).heads.heads_per_layer
    fitting = {name: layout for name, layout in layouts.items() if layout.heads_per_layer == heads}
    return zero_shot.cache_shares(model, fitting, context)


def _store(
    options: DecisionOptions,
    subject: Subject,
    model: PreTrainedModel,
    text: TokenBlocks | None,
    reporter: progress.Reporter,
) -> ScoreStore:
    """Return the store of scores of the dense model and of candidates, in its family's folder."""
    return ScoreStore(
        model,
        Contender("dense", options.model),
        options.folders.run_dir(subject.family) / "verdict",
        load=lambda source: load(options, source, reporter)[0],
        setting=(str(options.dtype), str(device.measuring_device(options.device))),
        text=text,
    )


def _setting(
    options: DecisionOptions, loaded: Loaded, text: TokenBlocks | None, reporter: progress.Reporter
) -> criterion.Setting:
    """Return what every criterion measures with."""
    model, tokenizer = loaded
    return criterion.Setting(
        dense=model,
        known_tokenizer=tokenizer,
        text=text,
        seed=SEED,
        identity=checkpoint.checkpoint_hash(options.model),
        reporter=reporter,
    )


def _whole(
    options: DecisionOptions, subject: Subject, loaded: Loaded, reporter: progress.Reporter
) -> tuple[TokenBlocks, SeparatorReport]:
    """Read the text, check that the model can run it, and return it with what separates its documents."""
    model, tokenizer = loaded
    separator = subject.separator(model, tokenizer, reporter)
    _, whole = subject.read(tokenizer, separator, reporter)
    micro_batch.check_positions(model, whole.block_size, "--context")
    micro_batch.require_logits(model, 1, whole.block_size)
    return whole, separator


def _text(
    options: DecisionOptions,
    model: PreTrainedModel,
    whole: TokenBlocks,
    separator: SeparatorReport,
    selected: Selected,
    reporter: progress.Reporter,
) -> tuple[TokenBlocks, alarms.Circumstances]:
    """Return the text in random order without the documents that selected layouts, and its circumstances."""
    text = text_in_random_order(
        whole,
        seed=SEED,
        selected=selected.documents,
        by=", ".join(selected.among(whole)),
        max_tokens=options.max_tokens,
    )
    # Check that the model knows the text
    with reporter.bar("checking the text"):
        circumstances, _ = alarms.check_text(
            model, text, windows.default_window(model, text.block_size), separator
        )
    return text, circumstances


def origin(options: DecisionOptions, compared: Compared) -> dict[str, object]:
    """Return what the records of both commands say: the candidates, the risk, the text, and what was left out."""
    dense = checkpoint.model_origin(options.model)
    data = None
    if compared.num_left_out is not None:
        data = options.data or "held-out text of the embedded models"
    return {
        "candidates": {each.name: each.source for each in compared.candidates},
        "risk": criteria.parse_risk(options.risk),
        "margin": options.margin,
        "against": dense.pop("model"),
        **{f"against_{key}": value for key, value in dense.items()},
        "data": data,
        "seed": SEED,
        "nouns": compared.trial.nouns,
        "num_samples": compared.trial.num_samples,
        "left_out": {"documents": compared.num_left_out, "selected_by": list(compared.selected.by)},
        "unrecorded": list(compared.selected.unknown),
        "context": compared.context,
        "layouts": {
            each.name: _layout_record(each, each.chosen, percent(compared, each.name))
            for each in compared.candidates
            if each.chosen is not None
        },
    }


def _layout_record(
    candidate: Contender, layout: Layout, kv_cache_percent: float | None
) -> dict[str, object]:
    """Return the record of a candidate's layout."""
    return {
        "heads": layout.words,
        "window": layout.window,
        "sinks": layout.sinks,
        "trained": candidate.layout is None,
        "kv_cache_percent": kv_cache_percent,
    }


def percent(compared: Compared, name: str) -> float | None:
    """Return a layout's KV cache in percent of full attention's; None if it is not known."""
    return round(100.0 * compared.memory[name], 2) if name in compared.memory else None


def shared_document(
    compared: Compared, outcome: Outcome, sentences: Sequence[str]
) -> dict[str, object]:
    """Return what ``--json`` prints of both commands; ``sentences`` may have markup."""
    return {
        "name": compared.name,
        "against": compared.against,
        "criteria": outcome.rows.astype(object).where(outcome.rows.notna(), None),
        "sentences": [Text.from_markup(line).plain for line in sentences],
        "risk": outcome.risk,
        "left_out": {"documents": compared.num_left_out, "selected_by": compared.selected.by},
    }


def measured_by(
    compared: Compared, outcome: Outcome, rows: pd.DataFrame | None = None
) -> list[Measurement]:
    """Return the measurements of an outcome, or of some of its rows."""
    record = {
        "risk": outcome.risk,
        "nouns": outcome.nouns,
        "num_samples": outcome.num_samples,
        "against": compared.against,
        "notes": outcome.notes,
    }
    return measurements(outcome.rows if rows is None else rows, record)


def rounded_positions(outcome: Outcome) -> dict[str, list[list[float]]]:
    """Return the NLL by position of every candidate that has any, as the record holds it."""
    return {
        name: [_rounded(row) for row in rows] for name, rows in outcome.by_position.items() if rows
    }


def recorded_notes(outcome: Outcome) -> dict[str, dict[str, str]]:
    """Return what criteria say about every candidate besides its losses, as the record holds it."""
    return {name: dict(notes) for name, notes in outcome.notes.items() if notes}


def _rounded(row: Sequence[float]) -> list[float]:
    """Return a row with its NLLs, which begin at the fourth column, rounded."""
    return [*row[:3], *(round(nll, 5) for nll in row[3:])]


def loss_cells(measured: Measurement) -> list[str]:
    """Return the cells of a row from its criterion on: loss, interval, margin and samples."""
    return [
        console.escape(measured.criterion),
        loss_text(measured.loss),
        measured.interval,
        f"{measured.margin:g} {measured.unit}",
        measured.samples,
    ]
