"""Declare the options of the ``critical-budget`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import errors, flag
from spkv_nas.proposal.budget import MEMORY, parse_budgets, parse_memories
from spkv_nas.stages import flags
from spkv_nas.stages.options import ONLY_PROBE, ChoosesProbe, EngineOptions, verdict


@dataclass(frozen=True, kw_only=True)
class CriticalBudgetOptions(EngineOptions, verdict.DecisionOptions, ChoosesProbe):
    """Find the smallest budget of global heads, or of memory, whose loss against a dense model is below a margin.

    A bisection of the budgets tests their layouts on the weights of --against, as verdict does, until the smallest that
    passes is known. That any budget passes wrongly, and that any fails wrongly, has a probability of at most --risk
    each, for all budgets together. For layouts with constraints, or with other windows, sinks or thresholds than the
    probe's, give the files that propose writes for several budgets. Writes reports/NAME/critical-budget.csv.

    Exits with 0 if a budget passes, 1 if the largest fails and no other passes, 3 otherwise. Samples are kept in
    runs/NAME/verdict/ and reused. spkv-nas verdict --help describes the criteria.
    """

    budgets: Annotated[
        list[str],
        flag.Flag(
            "Numbers of global heads: a range (4..40, 5%..50%; "
            "4..40:2 has step 2) or a list. Or shares of full "
            "attention's KV cache, for a probe with costs of windows: "
            "memory, memory=5%..50% or memory=10%,20%. "
            "Their layouts are those that propose makes of --probe. "
            "Or layout files (YAML), such as "
            "layouts/NAME/budgets/*.yaml.",
            metavar="RANGE|LAYOUT...",
            argument=True,
        ),
    ]
    probe: flags.OptionalProbe = flag.default(None, f"{ONLY_PROBE}, or that of the layouts")
    granularity: flags.Granularity = flag.default("head", note="Applies to a range of budgets.")
    batch: flags.Batch = 1


def check(options: CriticalBudgetOptions) -> None:
    """Check the margins, the risk, the text, the budgets or layout files, and the engine."""
    from spkv_nas.stages import engines, lookup

    verdict.check_decision(options)
    engines.chosen_engine(options)
    # Check the budgets or layout files: one of the two
    files = [text for text in options.budgets if verdict.is_layout(text)]
    for file in files:
        Layout.read(file)
    if files and len(files) < len(options.budgets):
        raise errors.UserError("give either budgets or layout files, not both")
    text = ",".join(options.budgets)
    if text.startswith(MEMORY):
        parse_memories(text)
    elif not files:
        parse_budgets(text, lookup.chosen_table(options).num_candidates)
