"""Evaluate layouts without training and retrained, both on the text not used for selection."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cells import Cell
from choosers import chosen
from references import Subject

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.layout import Layout
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.training.variants import Variant

_ANY = "study"  # strategy name for retraining: a layout chosen by two choosers is retrained once


def score_file(subject: Subject, layout: Layout | None, block_size: int | None = None) -> Path:
    """Return the file of a layout's NLL without training; None is full attention.

    Other block sizes than the reference's have their own folder.
    """
    folder = subject.folder / ("zero-shot" if block_size is None else f"zero-shot-{block_size}")
    return folder / f"{FULL_ATTENTION if layout is None else layout.content_hash}.npz"


def score(subject: Subject, layout: Layout | None, block_size: int | None = None) -> DocumentNLL:
    """Return the NLL of a layout without training, from its file if it exists."""
    file = score_file(subject, layout, block_size)
    if file.is_file():
        return DocumentNLL.read(file)
    judged = subject.parts[1] if block_size is None else subject.parts[1].cut(block_size)
    return zero_shot(subject.model(), [layout], judged, cache=file.parent)[0]


def score_cells(subject: Subject, budget: str) -> Iterator[Cell]:
    """Yield the cells that score full attention and every layout of a budget chosen so far."""
    for name, layout in _layouts(subject, budget):
        title = f"{subject.name}: {name or FULL_ATTENTION} at {budget}, without training"
        yield Cell("zero-shot", title, score_file(subject, layout), partial(score, subject, layout), name)


def _layouts(subject: Subject, budget: str) -> list[tuple[str | None, Layout | None]]:
    """Return (chooser name, layout) pairs: full attention as (None, None), and every layout chosen so far."""
    layouts = chosen(subject, subject.heads(budget))
    return [(None, None), *((chooser.name, layout) for chooser, layout in layouts)]


def retrained_file(subject: Subject, layout: Layout | None, seed: int) -> Path:
    """Return the file of a layout's NLL after retraining; None is full attention."""
    name = FULL_ATTENTION if layout is None else layout.content_hash
    return subject.folder / "retrained" / f"{name}-seed{seed}.npz"


def retrain_cells(subject: Subject) -> Iterator[Cell]:
    """Yield the cells that retrain full attention and every layout chosen so far, seed by seed."""
    retrain_plan = subject.plan.retrain
    layouts = _layouts(subject, retrain_plan.budget)
    for seed in retrain_plan.seeds:
        for name, layout in layouts:
            file = retrained_file(subject, layout, seed)
            title = f"{subject.name}: {name or FULL_ATTENTION} at {retrain_plan.budget}, retrained, seed {seed}"
            yield Cell("retrained", title, file, partial(_retrain, subject, layout, seed), name)


def _retrain(subject: Subject, layout: Layout | None, seed: int) -> None:
    """Retrain a layout and keep its NLL, but not its checkpoint."""
    context = subject.trunk_of(branch=subject.plan.retrain.branch)
    variant = Variant.full_attention()
    if layout is not None:
        variant = Variant.hybrid(Layout(layout.heads, layout.window, _ANY))
    context.train(variant, seed).nll.save(retrained_file(subject, layout, seed))
    shutil.rmtree(context.folder(variant, seed))
