"""Describe a signal: a score of every KV head by its need for global attention.

A signal is one class that carries everything the commands need to know about it, its options included
(``base.entry``). ``probe --help``, ``--dry-run``, ``plan``, the tables and the report are made from it. The built-in
signals are in ``probing.signals``; a package adds its own by an entry point of the group ``spkv_nas.signals``
(docs/tutorials/extend.md)::

    @dataclass(frozen=True)
    class ValueNorm(Signal):
        name, help = "value-norm", "mean norm of a head's values"
        kind, unit = SCORE, "norm"

        def measure(self, model, blocks, window, *, name, metadata=None, progress=None):
            ...
            return self.table(means, window, ...)

A module of a signal is imported by every ``--help``, so it must import torch inside its functions.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.kinds import SHARE, SHARE_UNIT
from spkv_nas.base import entry, errors, flag, limits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.base.progress import Progress
    from spkv_nas.cost.stage_costs import StageCost, Stages
    from spkv_nas.data.blocks import TokenBlocks
    from spkv_nas.probing.heads import HeadMeans

# Flags that several signals share
STEPS = flag.Flag("Training steps.", low=1, high=limits.MAX_STEPS)
SEED = flag.Flag("Random seed.", low=0, high=limits.MAX_SEED)
BUDGET = flag.Flag("Number of global KV heads, or a share such as 25%.", ("--budget", "-b"), "N|N%")
Steps = Annotated[int, STEPS]
Seed = Annotated[int, SEED]
Budget = Annotated[str | None, BUDGET]
GRANULARITIES = HEAD, LAYER = "head", "layer"

SINKS = flag.Flag(
    "Sink tokens: first tokens of a sequence that a local head sees besides its window. auto: 0, 1, 2 or 4, by the "
    "model's measured attention on first tokens; a layout or gates of the model keep their own number.",
    metavar="auto|N",
)


@dataclass(frozen=True)
class Work:
    """Cost of a signal: ``passes`` over ``tokens`` tokens, each as expensive as ``effort`` forward passes."""

    passes: float
    tokens: int
    effort: float = 1.0


class Signal(entry.Entry, ABC):
    """Score of every KV head, higher for heads that need global attention."""

    kind: ClassVar[str] = SHARE  # kind of the scores, one of ``artifacts.kinds.KINDS``
    unit: ClassVar[str] = SHARE_UNIT  # unit of the scores
    # whether it reads the blocks, which must then be longer than the window and the sink tokens
    reads_blocks: ClassVar[bool] = True
    # names of options that only ``probe`` uses, to learn gates or to validate the ranking
    used_by_command: ClassVar[tuple[str, ...]] = ()
    # whether it scores whole layouts. It then measures less text by default, and ``measure`` takes ``batch_size``, the
    # number of blocks per pass that fit in memory
    computes_logits: ClassVar[bool] = False
    # whether it measures SP-KV gates, which ``probe`` trains on models without. ``measure`` then takes ``batch_size``
    # and gets the gates' window
    needs_gates: ClassVar[bool] = False
    # whether ``measure`` takes ``sinks``, the number of first tokens that a local head sees besides its window (sink
    # tokens). Without it, the tables of a signal still record the number for layouts
    takes_sinks: ClassVar[bool] = False
    # whether ``measure`` takes ``cache``, a folder of layout scores shared with searches
    caches_scores: ClassVar[bool] = False
    cached_layers: ClassVar[float] = 0.0  # share of the layers whose hidden states stay in memory between passes
    is_bounded: ClassVar[bool] = False  # whether ``work`` is an upper bound

    @abstractmethod
    def measure(
        self,
        model: "PreTrainedModel",
        blocks: "TokenBlocks",
        window: int,
        *,
        name: str,
        metadata: dict[str, Any] | None = None,
        progress: "Progress | None" = None,
        **run: Any,
    ) -> "HeadScores":
        """Measure the signal; the model is as before afterwards. Called on all ranks of torchrun.

        Args:
            model: any supported decoder.
            blocks: held-out text.
            window: number of recent keys a local head sees, including the query's own key.
            name: name of the table.
            metadata: provenance of the model and the text, to store in the table.
            progress: called with (blocks or steps done, total).
            run: ``sinks``, ``batch_size`` and ``cache``, where the attributes say that the signal takes them.
        """

    def table(self, means: "Sequence[HeadMeans]", window: int, **facts: Any) -> "HeadScores":
        """Build the table of measured means; ``facts`` are ``passes``, ``tokens``, ``name`` and ``metadata``."""
        from spkv_nas.probing.heads import signal_table

        return signal_table(self.name, means, window, kind=self.kind, unit=self.unit, **facts)

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the cost on a text of ``tokens`` in blocks of ``block_size``, one pass by default."""
        return Work(1.0, tokens)

    def cost(self, stages: "Stages", tokens: int) -> "StageCost":
        """Return the memory and FLOPs of measuring on ``tokens`` tokens; arguments as in ``work``."""
        work = self.work(stages.size.heads.grid, tokens, stages.block_size)
        return stages.measure(
            self.stage_name, work.tokens, work.passes, scored=self.computes_logits, shares=self.cached_layers
        )

    @property
    def stage_name(self) -> str:
        """Return the name of its stage in a plan."""
        return f"signal {self.name}{', at most' if self.is_bounded else ''}"


def parse_sinks(text: str | None) -> int | None:
    """Return the chosen number of sink tokens, None for "auto" or none; ``UserError`` for any other ``text``."""
    if text in (None, "auto"):
        return None
    if not str(text).isdecimal() or int(str(text)) > limits.MAX_WINDOW:
        raise errors.UserError(f"--sinks must be auto or a number of tokens up to {limits.MAX_WINDOW}; found '{text}'")
    return int(str(text))
