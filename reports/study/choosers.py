"""Choose layouts: by the signals of a reference, each a table of head scores, by rule, or at random."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from plan import ADD_ONE_HEAD, DUO, HEAD_GATES, LAYERS, LEARNED, PRICED, RANDOM, SIGNALS, Plan
from references import Subject
from rows import Row

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.probing.density import probe
from spkv_nas.probing.measure import measure_signal
from spkv_nas.probing.priced import learn_gates
from spkv_nas.proposal.propose import densest_layout
from spkv_nas.proposal.strategies import interleaved, random_heads

_ONCE = (DUO, ADD_ONE_HEAD)  # signals that do not depend on the budget
_STRATEGY = "study"  # of every layout, so that one that two choosers choose is retrained once


@dataclass(frozen=True)
class Job:
    """A layout to judge.

    Attributes:
        steps: steps of retraining; 0 judges without.
        budget: budget in the plan.
        chooser: name of a signal, of a rule, or of a random draw.
        chosen: sink tokens of local heads while the signal was measured; None without a signal.
        run: sink tokens of the layout, or "learned".
    """

    steps: int
    budget: str
    chooser: str
    chosen: int | None
    run: int | str


def jobs(plan: Plan, reference: str) -> list[Job]:
    """Return the jobs of a reference, each once, in the plan's order."""
    return list(
        dict.fromkeys(
            Job(part.steps, budget, chooser, pair.chosen if chooser in SIGNALS else None, pair.run)
            for part in plan.judged
            if part.references is None or reference in part.references
            for budget in part.budgets
            for chooser in part.choosers
            for pair in part.sinks
        )
    )


@dataclass(frozen=True)
class Measurement:
    """A signal of a reference to measure.

    Attributes:
        subject: the reference.
        name: name of the signal.
        heads: budget in global heads, which some signals depend on.
        sinks: sink tokens that local heads see.
    """

    subject: Subject
    name: str
    heads: int
    sinks: int

    @property
    def row(self) -> Row:
        """Return the row of its table."""
        budget = "" if self.name in _ONCE else f"-{self.heads}"
        return Row(self.subject.folder / "signals.jsonl", f"{self.name}{budget}-sinks-{self.sinks}")

    def read(self) -> HeadScores:
        """Read the table; it must have been measured."""
        values = self.row.read()
        record = values["record"]
        rows = pd.DataFrame(values["scores"]).astype({"standard_error": float})
        return HeadScores(
            record["name"], rows, record["tau"], record["window"], record=ProbeRecord.of(record)
        )

    def write(self) -> None:
        """Measure the signal and write its table."""
        with self.subject.reporter.bar(self.row.run) as progress:
            table = self._priced(progress) if self.name == PRICED else self._scored(progress)
        record = {"name": table.name, "kind": table.kind, "tau": table.tau, "window": table.window}
        scores = table.rows.astype(object).where(table.rows.notna(), None).to_dict("list")
        self.row.write({"record": {**table.record.entries(), **record}, "scores": scores})

    def _scored(self, progress: Any) -> HeadScores:
        """Measure one of the library's signals."""
        plan, blocks = self.subject.plan, self.subject.parts[0]
        options: dict[str, Any] = {
            HEAD_GATES: {"budget": self.heads, "steps": plan.steps.head_gates},
            DUO: {"steps": plan.steps.duo},
        }.get(self.name, {})
        if self.name == ADD_ONE_HEAD:
            blocks = blocks.spread(max(1, plan.scored_on // blocks.block_size))
        options |= {
            "window": plan.window,
            "sinks": self.sinks,
            "name": self.name,
            "progress": progress,
        }
        return measure_signal(self.name, self.subject.model(), blocks, **options)

    def _priced(self, progress: Any) -> HeadScores:
        """Learn gates on the frozen model at the price of the budget, and measure their densities at the plan's tau."""
        subject, plan = self.subject, self.subject.plan
        share = self.heads / math.prod(subject.grid)
        config = GateConfig(
            window=plan.window, tau=plan.tau, sinks=self.sinks, target_density=share
        )
        model, state = subject.model(), subject.work / "state" / self.row.run
        train = subject.context.corpus.train
        learn_gates(model, train, config, steps=plan.steps.priced, state=state, progress=progress)
        table = probe(model, subject.parts[0], plan.tau, name=self.name)
        shutil.rmtree(state)
        return table


def measurement(subject: Subject, job: Job) -> Measurement | None:
    """Return the measurement that a job's layout is chosen by; None without a signal."""
    if job.chosen is None:
        return None
    return Measurement(subject, job.chooser, subject.heads(job.budget), job.chosen)


def choose(subject: Subject, job: Job) -> Layout | None:
    """Return the layout of a job; None if its signal has not been measured."""
    heads = subject.heads(job.budget)
    window = subject.plan.window
    needed = measurement(subject, job)
    if needed is not None:
        if not needed.row.exists():
            return None
        layout = densest_layout(needed.read(), heads, window=window)
    elif job.chooser == LAYERS:
        layout = Layout.from_mask(
            interleaved(*subject.grid, heads, local_first=True), window=window
        )
    else:
        mask = random_heads(*subject.grid, heads, int(job.chooser.removeprefix(RANDOM)))
        layout = Layout.from_mask(mask, window=window)
    sinks = 0 if job.run == LEARNED else int(job.run)
    return replace(layout, sinks=sinks, strategy=_STRATEGY, provenance={})
