"""Declare the options of the ``auto`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from spkv_nas.base import errors, units
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.replace import check_new
from spkv_nas.engines.registry import ENGINES
from spkv_nas.evaluation.verdict.criteria import parse_risk
from spkv_nas.proposal.budget import MEMORIES, MEMORY, parse_memories
from spkv_nas.stages import flags
from spkv_nas.stages.options import SEPARATELY, TEXT_CONTEXT, Trains, critical_budget
from spkv_nas.stages.options.export import ExportOptions, ForEngine, Out
from spkv_nas.stages.options.init import Minutes, ModelArgument, Texts
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.verdict import Margin, Risk, VerdictOptions, check_decision

HELD_OUT_TOKENS = 262_144  # to compare on, at most: 128 blocks of 2,048 tokens
Memories = Annotated[
    str | None,
    Flag(
        "Only this share of full attention's KV cache, or the smallest of these: 20%, 10%..40%.",
        metavar="N%|RANGE",
    ),
]
Retrain = Annotated[
    str | None,
    Flag(
        "Also retrain up to three smaller hybrids for this long together, "
        "or for a number of steps each, "
        "on the selection half of the documents. "
        "They are tested on the other half, at half of the risk; a smaller "
        "hybrid that passes is exported.",
        metavar="TIME|STEPS",
    ),
]


@dataclass(frozen=True, kw_only=True)
class AutoOptions(Trains):
    """Find the smallest KV cache with which a model loses less than a margin, and export that hybrid.

    Measures on part of the text what each window of local attention costs each KV head, compares layouts of several
    kinds for each memory budget that it looks at, and bisects the budgets for the smallest whose loss is below
    --margin, on documents not used for selection. A wrong pass has a probability of at most --risk. Exports the model
    with this layout, and writes a report. Without --retrain no weight changes. After an interruption, the same command
    reuses what was measured.

    Exits with 0 if a layout passes, 1 if all fail, 3 otherwise.
    """

    model: ModelArgument
    data: Texts
    out: Out
    margin: Margin = "nll=1%"
    risk: Risk = "5%"
    memory: Memories = default(None, f"{MEMORIES[0]}%..{MEMORIES[-1]}%")
    budget: flags.OptionalBudget = default(
        None, "none", note="Replaces --memory; all other heads have one window."
    )
    retrain: Retrain = default(None, "no retraining")
    engine: ForEngine = default(None, "none")
    max_tokens: flags.OptionalMaxTokens = default(
        None, f"{HELD_OUT_TOKENS:,}", note="Of text not used for selection."
    )
    context: flags.TextContext = default(None, TEXT_CONTEXT)
    documents: flags.Documents = default(None, SEPARATELY)
    batch: flags.Batch = 1
    minutes: Minutes = default(
        None, note="Then no further budget is tried; costs of windows are measured in any case."
    )

    @property
    def measured(self) -> dict[str, Any]:
        """Return the options that name the model, its text and its device."""
        names = ("model", "data", "context", "documents", "workspace", "device")
        return {name: getattr(self, name) for name in names}

    @property
    def probe(self) -> ProbeOptions:
        """Return the options that measure the costs of windows."""
        return ProbeOptions(signal="window-costs", dry_run=self.dry_run, **self.measured)

    def search(self, probe: str | None) -> critical_budget.CriticalBudgetOptions:
        """Return the options that find the smallest memory by the costs of a probe."""
        budget = self.budget
        if not budget:
            budget = MEMORY if self.memory is None else f"{MEMORY}={self.memory}"
        return critical_budget.CriticalBudgetOptions(
            budgets=[budget], probe=probe, batch=self.batch, **self._decision(probe)
        )

    def verdict(self, probe: str, checkpoints: list[str]) -> VerdictOptions:
        """Return the options that decide whether retrained hybrids pass, on half of twice as much text."""
        options = VerdictOptions(candidates=checkpoints, **self._decision(probe))
        return replace(options, max_tokens=2 * (self.max_tokens or HELD_OUT_TOKENS))

    def _decision(self, probe: str | None) -> dict[str, Any]:
        """Return the options of a decision; with retraining there are two, which share the risk."""
        risk = self.risk
        if self.retrain is not None:
            risk = f"{50.0 * parse_risk(self.risk):g}%"
        return {
            "name": probe,
            "margin": self.margin,
            "risk": risk,
            "max_tokens": self.max_tokens or HELD_OUT_TOKENS,
            **self.measured,
        }

    def export(self, layout: Path | None, model: str) -> ExportOptions:
        """Return the options that export a model with a layout; None: its own."""
        return ExportOptions(
            layout=layout, model=model, out=self.out, engine=self.engine, workspace=self.workspace
        )


def check(options: AutoOptions) -> None:
    """Check the model, the text, the margins, the memory, the engine, and that the folder is empty or an export."""
    if options.memory is not None:
        parse_memories(f"{MEMORY}={options.memory}")
    if options.memory is not None and options.budget is not None:
        raise errors.UserError("give --memory or --budget, not both")
    if options.retrain is not None:
        units.parse_length(options.retrain)
    if options.engine is not None:
        _ = ENGINES[options.engine]  # raises
    check_decision(replace(options.search(None), max_tokens=options.max_tokens))
    if not (options.out / "layout.yaml").is_file():
        check_new(options.out)
