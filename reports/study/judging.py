"""Judge layouts on the text that no signal has seen: as they are, or after retraining that heals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from cells import Cell
from choosers import Job, choose, jobs
from plan import LEARNED
from references import Subject
from rows import Row

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.layout import Layout
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.windows import add_learned_sinks, apply_layout
from spkv_nas.training.branch_setup import measure_initial_sinks
from spkv_nas.training.variants import Variant


def result_row(
    subject: Subject, steps: int, layout: Layout | None = None, run: int | str = 0
) -> Row:
    """Return the row of the NLL of a layout after ``steps`` steps of retraining; None is full attention."""
    name = FULL_ATTENTION if layout is None else layout.content_hash
    return Row(
        subject.folder / "judged.jsonl", f"{steps}/{name}{'-learned' if run == LEARNED else ''}"
    )


def _write(row: Row, nll: DocumentNLL) -> None:
    """Write the NLL by document."""
    row.write({"total": nll.total.tolist(), "num_tokens": nll.num_tokens.tolist()})


def read_nll(row: Row) -> DocumentNLL:
    """Read the NLL by document of a finished row."""
    values = row.read()
    return DocumentNLL(np.array(values["total"]), np.array(values["num_tokens"]))


def judge_cells(subject: Subject) -> Iterator[tuple[Cell, Job]]:
    """Yield the cells that judge every layout whose signal was measured, each after its control, with their jobs."""
    for job in jobs(subject.plan, subject.name):
        layout = choose(subject, job)
        if layout is not None:
            yield (
                _cell(subject, job.steps, f"{subject.name}: full attention, {job.steps} steps"),
                job,
            )
            pair = (
                f"run with {job.run} sinks"
                if job.chosen is None
                else f"chosen with {job.chosen}, run with {job.run}"
            )
            title = f"{subject.name}: {job.chooser} at {job.budget}, {pair}, {job.steps} steps"
            yield _cell(subject, job.steps, title, layout, job.run), job


def _cell(
    subject: Subject, steps: int, title: str, layout: Layout | None = None, run: int | str = 0
) -> Cell:
    """Return the cell that judges a layout, or full attention."""
    row = result_row(subject, steps, layout, run)
    return Cell(f"judge-{steps}", title, row, partial(_judge, subject, steps, layout, run, row))


def _judge(subject: Subject, steps: int, layout: Layout | None, run: int | str, row: Row) -> None:
    """Judge a layout, or full attention, and write its NLL; a retrained checkpoint is not kept."""
    if not steps:
        _write(row, _judge_as_is(subject, layout, run))
        return
    context = subject.healing(steps, learns_sinks=run == LEARNED)
    variant = Variant.full_attention() if layout is None else Variant.hybrid(layout)
    _write(row, context.train(variant).nll)
    shutil.rmtree(context.folder(variant))


def _judge_as_is(subject: Subject, layout: Layout | None, run: int | str) -> DocumentNLL:
    """Judge a layout on the dense model's weights, with learned sinks at the values that training would start from."""
    model, judged = subject.model(), subject.parts[1]
    if layout is None or run != LEARNED:
        return zero_shot(model, [layout], judged)[0]
    logits = measure_initial_sinks(model, layout, subject.context.corpus.train)
    apply_layout(model, layout)
    add_learned_sinks(model, logits)
    with torch.inference_mode():
        return document_nll(model, judged)
