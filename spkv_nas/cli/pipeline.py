"""The path itself: probe, propose, compare, report, and the demo of all of it."""

from __future__ import annotations

import time
from typing import Any

from spkv_nas.cli import show
from spkv_nas.cli.console import out, reporter, say_where
from spkv_nas.stages.options import (
    DEFAULT_PROBE,
    CompareOptions,
    DemoOptions,
    ProbeOptions,
    ProposeOptions,
    ReportOptions,
    TrainHybridOptions,
)

DEMO_TOKENS = 65_536  # a fifth of the held-out text; on a tenth the 18 densest heads lack a needed one: reports/LOG.md


def probe(options: ProbeOptions) -> None:
    """Measure the density of every KV head, or another signal. Writes probes/NAME/, or probes/NAME-SIGNAL/.

    Without arguments: the embedded reference on held-out standard library text.
    With --model and --data: your own checkpoint. With a recipe: train the reference, then probe it.
    """
    from spkv_nas.stages import probe as stage

    show.probe(stage.probe(options, reporter))


def propose(options: ProposeOptions) -> None:
    """Propose layouts for a budget of global heads, by every strategy. Writes layouts/NAME/.

    With a constraint, --robust or --weights: also the best layout that meets it.
    With several budgets: the best layout at each, and their curve, layouts/NAME/budgets.csv.
    """
    from spkv_nas.stages import propose as stage

    if stage.is_for_several(options):
        show.budgets(stage.propose_several(options, reporter))
    else:
        show.proposal(stage.propose(options, reporter))


def compare(options: CompareOptions) -> None:
    """Do probes agree on the heads? Of other domains, halves, thresholds, lengths, seeds or checkpoints of one grid.

    Writes reports/NAME/agreement.csv and its figure.
    """
    from spkv_nas.stages import propose as stage

    show.agreement(stage.compare(options))


def report(options: ReportOptions) -> None:
    """Write reports/NAME/index.html and the figures from what the other commands left in the workspace."""
    from spkv_nas.stages import report as stage

    say_where("report", stage.report(options))


def demo(options: DemoOptions) -> None:
    """The whole path on the embedded reference: probe, propose, train-hybrid, report (a few minutes on two cores).

    It writes to a workspace of its own, the folder demo/.
    """
    from spkv_nas.proposal.propose import MATCH_BUDGET
    from spkv_nas.stages import probe, propose, report, train

    start = time.perf_counter()
    where: dict[str, Any] = {"workspace": options.workspace}
    how: dict[str, Any] = {**where, "device": options.device, "dtype": options.dtype}
    show.probe(probe.probe(ProbeOptions(max_tokens=DEMO_TOKENS, **how), reporter))
    asked = ProposeOptions(budget=options.budget, tau=MATCH_BUDGET, num_random=1, **where)
    show.layouts(propose.propose(asked, reporter))
    show.comparison(train.train_hybrid(TrainHybridOptions(probe=DEFAULT_PROBE, **how), reporter))
    out.print()
    say_where("report", report.report(ReportOptions(probe=DEFAULT_PROBE, **where)))
    out.print(f"{time.perf_counter() - start:.0f} s in all")
