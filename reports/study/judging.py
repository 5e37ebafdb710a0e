"""Judge layouts on the text that no signal has seen: as they are, or after retraining that heals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from cells import Cell
from choosers import Job, choose, jobs
from plan import LEARNED
from references import Subject

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.layout import Layout
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.windows import add_learned_sinks, apply_layout
from spkv_nas.training.initial_sinks import measure_initial_sinks
from spkv_nas.training.variants import Variant


def result_file(subject: Subject, steps: int, layout: Layout | None = None, run: int | str = 0) -> Path:
    """Return the file of the NLL of a layout after ``steps`` steps of retraining; None is full attention."""
    name = FULL_ATTENTION if layout is None else layout.content_hash
    return subject.folder / "judged" / str(steps) / f"{name}{'-learned' if run == LEARNED else ''}.npz"


def judge_cells(subject: Subject) -> Iterator[tuple[Cell, Job]]:
    """Yield the cells that judge every layout whose signal was measured, each after its control, with their jobs."""
    for job in jobs(subject.plan, subject.name):
        layout = choose(subject, job)
        if layout is not None:
            yield _cell(subject, job.steps, f"{subject.name}: full attention, {job.steps} steps"), job
            pair = (
                f"run with {job.run} sinks" if job.chosen is None else f"chosen with {job.chosen}, run with {job.run}"
            )
            title = f"{subject.name}: {job.chooser} at {job.budget}, {pair}, {job.steps} steps"
            yield _cell(subject, job.steps, title, layout, job.run), job


def _cell(subject: Subject, steps: int, title: str, layout: Layout | None = None, run: int | str = 0) -> Cell:
    """Return the cell that judges a layout, or full attention."""
    file = result_file(subject, steps, layout, run)
    return Cell(f"judge-{steps}", title, file, partial(_judge, subject, steps, layout, run, file))


def _judge(subject: Subject, steps: int, layout: Layout | None, run: int | str, file: Path) -> None:
    """Judge a layout, or full attention, and write its NLL; a retrained checkpoint is not kept."""
    if not steps:
        _judge_as_is(subject, layout, run, file)
        return
    context = subject.healing(steps, learns_sinks=run == LEARNED)
    variant = Variant.full_attention() if layout is None else Variant.hybrid(layout)
    context.train(variant).nll.save(file)
    shutil.rmtree(context.folder(variant))


def _judge_as_is(subject: Subject, layout: Layout | None, run: int | str, file: Path) -> None:
    """Judge a layout on the dense model's weights, with learned sinks at the values that training would start from."""
    model, judged = subject.model(), subject.parts[1]
    if layout is None or run != LEARNED:
        zero_shot(model, [layout], judged)[0].save(file)
        return
    logits = measure_initial_sinks(model, layout, subject.context.corpus.train)
    apply_layout(model, layout)
    add_learned_sinks(model, logits)
    with torch.inference_mode():
        document_nll(model, judged).save(file)
