"""Declare the ``compare`` command: its options, their check, and its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.base.progress import Reporter
from spkv_nas.proposal.budget import PAPER_BUDGET
from spkv_nas.stages import flags
from spkv_nas.stages.options import InWorkspace
from spkv_nas.stages.result import Result

Probes = Annotated[
    list[str],
    Flag("Names or CSV files; NAME@0.7 is at another threshold.", metavar="PROBE", argument=True, is_probe=True),
]
By = Annotated[
    str | None,
    Flag(
        "Split every probe: by domain, or by half of its documents.", metavar="domain|half", values=("domain", "half")
    ),
]


@dataclass(frozen=True, kw_only=True)
class CompareOptions(InWorkspace):
    """Options of the ``compare`` command."""

    probes: Probes
    budget: flags.OptionalBudget = default(None, PAPER_BUDGET)
    by: By = None
    name: flags.Name = default(None, "the first probe's")


def compare(options: CompareOptions, reporter: Reporter) -> Result:
    """Compare how probes rank the heads: other domains, halves, thresholds, lengths, seeds or checkpoints of one grid.

    Writes reports/NAME/agreement.csv and its figure.
    """
    from spkv_nas.stages.compare import output, stage

    return Result(stage.compare(options, reporter), output.show)
