"""Declare the options of the ``compare`` command; the class's docstring is the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.base.flag import Flag, default
from spkv_nas.proposal.budget import PAPER_BUDGET
from spkv_nas.stages import commands, flags, options

Probes = Annotated[
    list[str],
    Flag(
        "Probe names or CSV files; NAME@0.7 selects another threshold.",
        metavar="PROBE",
        argument=True,
        is_probe=True,
    ),
]
SplitBy = Annotated[
    str | None,
    Flag(
        "Compare parts of each probe: its domains, or two halves of its documents.",
        metavar="domain|half",
        values=("domain", "half"),
    ),
]


@dataclass(frozen=True, kw_only=True)
class CompareOptions(options.InWorkspace, options.TakesLong):
    """Compare how probes rank the heads. Writes reports/NAME/agreement.csv and its figure.

    The probes may differ in domain, documents, threshold, sequence length, seed or checkpoint, but must have the same
    numbers of layers and KV heads.
    """

    probes: Probes
    budget: flags.OptionalBudget = default(None, PAPER_BUDGET)
    split_by: SplitBy = None
    name: flags.Name = default(None, "the first probe's")


COMPARE = commands.Command("compare", commands.runner(CompareOptions))
