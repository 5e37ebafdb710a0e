"""Run the ``propose`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.proposal.registry import STRATEGIES
from spkv_nas.stages.propose.options import ProposeOptions
from spkv_nas.stages.result import Result


def propose(options: ProposeOptions, reporter: Reporter) -> Result:
    """Propose layouts for a budget of global heads, with every strategy. Writes layouts/NAME/.

    A constraint, --robust or --head-costs adds the best layout that satisfies it. Several budgets give the best layout
    at each of them, and the curve of coverage against budget in layouts/NAME/budgets.csv.
    """
    from spkv_nas.stages.propose import output, stage

    if stage.is_for_several(options):
        return Result(stage.propose_several(options, reporter), output.show_budgets, output.budgets_document)
    result = stage.propose(options, reporter)
    return Result(result, output.show, output.document, next=result.next)


# The help lists the strategies of the registry, those of installed packages included
_STRATEGIES = "; ".join(f"{strategy.name}: {strategy.help}" for strategy in STRATEGIES)
propose.__doc__ = f"{propose.__doc__}\n    Strategies: {_STRATEGIES}.\n    "
