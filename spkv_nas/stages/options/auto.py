"""Declare the options of the ``auto`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from spkv_nas.artifacts import defaults
from spkv_nas.base.flag import Flag, default
from spkv_nas.proposal.budget import MEMORIES, MEMORY, parse_memories
from spkv_nas.stages import flags
from spkv_nas.stages.options import Trains
from spkv_nas.stages.options.critical_budget import CriticalBudgetOptions
from spkv_nas.stages.options.export import ExportOptions, ForEngine, Out
from spkv_nas.stages.options.init import Minutes, ModelArgument, Texts
from spkv_nas.stages.options.margins import Margin, Risk, check_decision
from spkv_nas.stages.options.probe import ProbeOptions

HELD_OUT_TOKENS = 262_144  # to compare on, at most: 128 blocks of 2,048 tokens
Memories = Annotated[
    str | None,
    Flag("Only this share of full attention's KV cache, or the smallest of these: 20%, 10%..40%.", metavar="N%|RANGE"),
]


@dataclass(frozen=True, kw_only=True)
class AutoOptions(Trains):
    """Find the smallest KV cache with which a model loses less than a margin, and export that hybrid.

    Measures on part of the text what each window of local attention costs each KV head, makes a layout with a window
    per head for each memory, and bisects these for the smallest whose loss is below --margin, on documents that chose
    nothing. A wrong pass has a probability of at most --risk. Exports the model with this layout, and writes a report.
    No weight changes. Run the same command again after an interruption: what was measured is reused.

    Exits with 0 if a layout passes, 1 if all fail, 3 otherwise.
    """

    model: ModelArgument
    data: Texts
    out: Out
    margin: Margin = "nll=1%"
    risk: Risk = "5%"
    memory: Memories = default(None, f"{MEMORIES[0]}%..{MEMORIES[-1]}%")
    engine: ForEngine = default(None, "none")
    max_tokens: flags.OptionalMaxTokens = default(None, f"{HELD_OUT_TOKENS:,}", note="Of documents that chose nothing.")
    block_size: flags.BlockSize = default(None, f"the model's context, up to {defaults.CONTEXT:,}")
    minutes: Minutes = default(None, note="Then no further memory is tried; costs of windows are measured in any case.")

    @property
    def measured(self) -> dict[str, Any]:
        """Return the options that name the model, its text and its device."""
        names = ("model", "data", "block_size", "workspace", "device")
        return {name: getattr(self, name) for name in names}

    @property
    def probe(self) -> ProbeOptions:
        """Return the options that measure the costs of windows."""
        return ProbeOptions(signal="window-costs", dry_run=self.dry_run, **self.measured)

    def search(self, probe: str | None) -> CriticalBudgetOptions:
        """Return the options that find the smallest memory by the costs of a probe."""
        budget = MEMORY if self.memory is None else f"{MEMORY}={self.memory}"
        decision: dict[str, Any] = {"margin": self.margin, "risk": self.risk}
        decision["max_tokens"] = self.max_tokens or HELD_OUT_TOKENS
        return CriticalBudgetOptions(budgets=[budget], probe=probe, name=probe, **decision, **self.measured)

    def export(self, layout: Path) -> ExportOptions:
        """Return the options that export the model with a layout."""
        return ExportOptions(
            layout=layout, model=self.model, out=self.out, engine=self.engine, workspace=self.workspace
        )


def check(options: AutoOptions) -> None:
    """Check the model, the text, the margins, the memory, the engine, and that the folder is empty or an export."""
    from spkv_nas.base.replace import check_new
    from spkv_nas.engines.registry import ENGINES

    if options.memory is not None:
        parse_memories(f"{MEMORY}={options.memory}")
    if options.engine is not None:
        _ = ENGINES[options.engine]  # raises
    check_decision(replace(options.search(None), max_tokens=options.max_tokens))
    if not (options.out / "layout.yaml").is_file():
        check_new(options.out)
