"""Declare the options of ``verdict --budgets``, and check them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag, default
from spkv_nas.stages import flags
from spkv_nas.stages.options import LONGEST, ONLY_PROBE, ConstraintOptions

Budgets = Annotated[
    str | None,
    Flag(
        "Find the smallest of these budgets of global heads whose layout passes: a range (4..40, 5%..50%; 4..40:2 has "
        "step 2) or a list. Layouts are those that propose makes of --probe.",
        metavar="RANGE|LIST",
    ),
]


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(ConstraintOptions):
    """Options of ``verdict --budgets``: the layouts that ``propose`` makes, and the cache whose memory they save."""

    budgets: Budgets = None
    probe: flags.OptionalProbe = default(None, ONLY_PROBE, note="Applies to --budgets.")
    tau: flags.ChosenTau = default(note="Applies to --budgets.")
    window: flags.OptionalWindow = default(None, "the probe's", note="Applies to --budgets.")
    sinks: flags.OptionalSinks = default(None, "the probe's", note="Applies to --budgets.")
    context: flags.OptionalContext = default(None, LONGEST)
    head_dim: flags.HeadDim = default(None, "the model's")
    kv_dtype: flags.KvDtype = default(None, "the model's")


def check_budget_options(options: BudgetOptions, candidates: Sequence[str] | None) -> None:
    """Check that there are either candidates or budgets, and that no option applies to the other.

    Raises:
        UserError: naming the option.
    """
    from spkv_nas.proposal.constraints import option_name

    if options.budgets is not None:
        if candidates:
            raise UserError("--budgets makes the layouts that it judges: leave out the candidates, or --budgets")
        return
    if not candidates:
        raise UserError(
            "no candidates: give checkpoints or layout files, or --budgets LOW..HIGH to find the smallest budget that "
            "passes"
        )
    for field in fields(BudgetOptions):
        if getattr(options, field.name) != field.default:
            name = option_name(field.name)
            raise UserError(f"{name} applies to --budgets only: remove it, or give --budgets")
