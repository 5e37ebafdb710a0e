"""Build the tables from finished results: what every layout costs, and differences that answer the questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd
from choosers import Job, choose, jobs
from judging import read_nll, result_row
from plan import HEAD_GATES
from references import Subject

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference, paired_difference

ORDER, CHOOSING, RUNNING = "order", "choosing", "running"
GROUP = ["reference", "budget", "steps", "chooser", "chosen", "run"]
_SINK = 1  # sink tokens that the others are compared with


@dataclass(frozen=True)
class Result:
    """A judged layout.

    Attributes:
        subject: the reference.
        job: what was judged.
        layout: its layout.
        nll: NLL by document.
        control: that of full attention after as many steps.
        dense: that of the dense model as it is.
    """

    subject: Subject
    job: Job
    layout: Layout
    nll: DocumentNLL
    control: DocumentNLL
    dense: DocumentNLL

    def points(self, rival: DocumentNLL) -> PairedDifference:
        """Return its ΔNLL minus a rival's: both count from the dense model, so tables can be subtracted."""
        ratio, error = jackknife_ratio(self.nll.total - rival.total, self.dense.total)
        return PairedDifference(100.0 * float(ratio), 100.0 * float(error))

    @property
    def key(self) -> tuple[str, str, int, str, str, str]:
        """Return the values of the columns ``GROUP``."""
        job = self.job
        return (
            self.subject.name,
            job.budget,
            job.steps,
            job.chooser,
            _shown(job.chosen),
            str(job.run),
        )


def results(subject: Subject) -> Iterator[Result]:
    """Yield the finished results of a reference."""
    for job in jobs(subject.plan, subject.name):
        layout = choose(subject, job)
        if layout is None:
            continue
        rows = [
            result_row(subject, job.steps, layout, job.run),
            result_row(subject, job.steps),
            result_row(subject, 0),
        ]
        if all(row.exists() for row in rows):
            yield Result(subject, job, layout, *map(read_nll, rows))


def delta_table(found: Sequence[Result]) -> pd.DataFrame:
    """Tabulate ΔNLL % of every layout and of its control, and the points between them, with errors by document."""
    rows = []
    for result in found:
        change, own_change = (
            paired_difference(nll, result.dense) for nll in (result.nll, result.control)
        )
        heads = result.layout.num_global, result.subject.heads(result.job.budget)
        values = _values(change, result.points(result.control), own_change)
        rows.append((*result.key, *heads, result.layout.hash, *values))
    columns = [
        "heads",
        "asked",
        "layout",
        "delta_nll_percent",
        "standard_error",
        "from_control_points",
    ]
    others = ["from_control_error", "control_percent", "control_error"]
    return pd.DataFrame(rows, columns=[*GROUP, *columns, *others])


def difference_table(found: Sequence[Result]) -> pd.DataFrame:
    """Tabulate the differences between layouts that answer the study's questions, in points, paired by document.

    Of the same reference, budget and steps:

    - order: every chooser minus head gates, both with the same sinks.
    - choosing: heads chosen with one sink token, minus heads chosen without, both run alike.
    - running: every kind of sinks minus one sink token, of the same chooser.
    """
    by_key = {(result.subject.name, result.job): result for result in found}
    rows = []
    for result in found:
        job = result.job
        plain = plain_sinks(job.run)
        is_plain = job.chosen in (None, plain)
        rivals = {
            ORDER: replace(job, chooser=HEAD_GATES, chosen=plain)
            if is_plain and job.chooser != HEAD_GATES
            else None,
            CHOOSING: replace(job, chosen=0) if is_plain and job.chosen else None,
            RUNNING: replace(job, chosen=None if job.chosen is None else _SINK, run=_SINK)
            if job.run != _SINK
            else None,
        }
        for question, rival_job in rivals.items():
            rival = None if rival_job is None else by_key.get((result.subject.name, rival_job))
            if rival is not None:
                change = result.points(rival.nll)
                rows.append(
                    (question, *result.key, *_values(change), _verdict(result, rival, change))
                )
    columns = ["difference_points", "standard_error", "verdict"]
    return pd.DataFrame(rows, columns=["question", *GROUP, *columns])


def missing(subjects: Sequence[Subject], found: Sequence[Result]) -> list[str]:
    """List what is unfinished, one line per reference."""
    lines = []
    for subject in subjects:
        if not subject.note.is_file():
            lines.append(f"{subject.name}: not prepared")
            continue
        finished = {result.job for result in found if result.subject.name == subject.name}
        left = [job for job in jobs(subject.plan, subject.name) if job not in finished]
        if left:
            lines.append(
                f"{subject.name}: {len(left)} of {len(left) + len(finished)} layouts are not evaluated"
            )
    return lines


def plain_sinks(run: int | str) -> int:
    """Return the sink tokens that heads are plainly chosen with: one if their layout runs with any, or learned ones."""
    return 0 if str(run) == "0" else _SINK


def _shown(sinks: int | None) -> str:
    """Return the sinks that a chooser saw, for a table."""
    return "" if sinks is None else str(sinks)


def _values(*changes: PairedDifference) -> list[float]:
    """Return percentages and errors, one after the other."""
    return [value for change in changes for value in (change.percent, change.standard_error)]


def _verdict(result: Result, rival: Result, change: PairedDifference) -> str:
    """Return which of two results is better by more than two standard errors, if any."""
    if result.layout.content_hash == rival.layout.content_hash and result.job.run == rival.job.run:
        return "same layout"
    if abs(change.percent) <= 2 * change.standard_error:
        return "level"
    return "better" if change.percent < 0 else "worse"
