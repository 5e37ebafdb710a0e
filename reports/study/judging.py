"""What layouts are worth: without training, and retrained, both on the text that nothing was chosen on."""

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

_ANY = "study"  # strategy of what is retrained: one layout that two chose is retrained once


def score_file(subject: Subject, layout: Layout | None, block_size: int | None = None) -> Path:
    """Of a layout's NLL without training, None full attention's; those in blocks of another size are apart."""
    folder = subject.folder / ("zero-shot" if block_size is None else f"zero-shot-{block_size}")
    return folder / f"{FULL_ATTENTION if layout is None else layout.content_hash}.npz"


def score(subject: Subject, layout: Layout | None, block_size: int | None = None) -> DocumentNLL:
    """The NLL of a layout without training, read if it is there."""
    file = score_file(subject, layout, block_size)
    if file.is_file():
        return DocumentNLL.read(file)
    judged = subject.parts[1] if block_size is None else subject.parts[1].cut(block_size)
    return zero_shot(subject.model(), [layout], judged, cache=file.parent)[0]


def score_cells(subject: Subject, budget: str) -> Iterator[Cell]:
    """Full attention, and every layout of a budget that is chosen by now."""
    for name, layout in _layouts(subject, budget):
        what = f"{subject.name}: {name or FULL_ATTENTION} at {budget}, without training"
        yield Cell("zero-shot", what, score_file(subject, layout), partial(score, subject, layout), name)


def _layouts(subject: Subject, budget: str) -> list[tuple[str | None, Layout | None]]:
    """Full attention, which nobody chose, and every layout that is chosen by now, with the chooser's name."""
    layouts = chosen(subject, subject.heads(budget))
    return [(None, None), *((chooser.name, layout) for chooser, layout in layouts)]


def retrained_file(subject: Subject, layout: Layout | None, seed: int) -> Path:
    """Of a layout's NLL after retraining, None full attention's."""
    name = FULL_ATTENTION if layout is None else layout.content_hash
    return subject.folder / "retrained" / f"{name}-seed{seed}.npz"


def retrain_cells(subject: Subject) -> Iterator[Cell]:
    """Full attention, and every layout that is chosen by now: all of the first seed, then of the next."""
    asked = subject.plan.retrain
    layouts = _layouts(subject, asked.budget)
    for seed in asked.seeds:
        for name, layout in layouts:
            file = retrained_file(subject, layout, seed)
            title = f"{subject.name}: {name or FULL_ATTENTION} at {asked.budget}, retrained, seed {seed}"
            yield Cell("retrained", title, file, partial(_retrain, subject, layout, seed), name)


def _retrain(subject: Subject, layout: Layout | None, seed: int) -> None:
    """Retrain; the NLL is kept, and the branch is not."""
    trunk = subject.trunk_of(branch=subject.plan.retrain.branch)
    variant = Variant.full_attention()
    if layout is not None:
        variant = Variant.hybrid(Layout(layout.heads, layout.window, _ANY))
    trunk.train(variant, seed).nll.save(retrained_file(subject, layout, seed))
    shutil.rmtree(trunk.folder(variant, seed))
