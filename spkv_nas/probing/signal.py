"""Describe a signal: a score of every KV head by its need for global attention.

A signal is one class in one file that carries everything the commands need to know about it. ``probe --help``,
``--dry-run``, ``plan``, the tables and the report are made from it. The built-in signals are in ``probing.signals``;
a package adds its own by an entry point of the group ``spkv_nas.signals`` (docs/tutorials/extend.md)::

    class ValueNorm(Signal):
        name, help = "value-norm", "mean norm of a head's values"
        kind, unit = SCORE, "norm"

        def measure(self, model, blocks, window, *, name, metadata=None, progress=None):
            ...
            return self.table(means, window, ...)

A module of a signal is imported by every ``--help``, so it must import torch inside its functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.grid import Grid
from spkv_nas.artifacts.kinds import SHARE, SHARE_UNIT
from spkv_nas.base.arguments import convert
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.base.progress import Progress
    from spkv_nas.cost.stage_costs import StageCost, Stages
    from spkv_nas.data.blocks import TokenBlocks
    from spkv_nas.probing.heads import HeadMeans


@dataclass(frozen=True)
class Option:
    """Option of a signal, which ``probe`` takes as a flag.

    Attributes:
        name: parameter of ``Signal.measure``; its dashed form is the flag.
        type: type of the value: int, float, str or bool.
        flag: help text and bounds. Signals that share an option share its flag.
        default: value where the user gives none.
        shown: wording of the default in the help; "" shows the default itself.
        is_measured: whether ``Signal.measure`` takes it; False if the command alone uses it.
    """

    name: str
    type: type
    flag: Flag
    default: Any = None
    shown: str = ""
    is_measured: bool = True

    @property
    def default_text(self) -> str:
        """Return the default as the help shows it."""
        return self.shown or (f"{self.default:,}" if isinstance(self.default, int) else str(self.default))

    def checked(self, value: Any) -> Any:
        """Return a value as the option's type. Raises ``UserError`` for another type, or outside of its bounds."""
        number = convert(self.name, self.type if self.type is not str else str | int, value)
        low, high = self.flag.low, self.flag.high
        if self.type is str:
            return str(number)
        if low is not None and number < low:
            raise UserError(f"{self.name} must be at least {low:g}; found {number}")
        if high is not None and number > high:
            raise UserError(f"{self.name} must be at most {high:g}; found {number}")
        return number


@dataclass(frozen=True)
class Work:
    """Cost of a signal: ``passes`` over ``tokens`` tokens, each as expensive as ``effort`` forward passes."""

    passes: float
    tokens: int
    effort: float = 1.0


class Signal(ABC):
    """Score of every KV head, higher for heads that need global attention.

    Attributes:
        name: choice of ``probe --signal``.
        help: one line without a full stop.
        kind: kind of the scores, one of ``artifacts.kinds.KINDS``.
        unit: unit of the scores.
        options: options besides the window, which every signal takes.
        computes_logits: whether it scores whole layouts. It then measures less text by default, and ``measure`` takes
            ``batch_size``, the number of blocks per pass that fit in memory.
        needs_gates: whether it measures SP-KV gates, which ``probe`` trains on models without. ``measure`` then takes
            ``batch_size`` and gets the gates' window.
        takes_sinks: whether ``measure`` takes ``sinks``, the number of first tokens that a local head sees besides its
            window (sink tokens). Without it, the tables of a signal still record the number for layouts.
        caches_scores: whether ``measure`` takes ``cache``, a folder of layout scores shared with searches.
        cached_layers: share of the layers whose hidden states stay in memory between passes.
        is_bounded: whether ``work`` is an upper bound.
    """

    name: str
    help: str
    kind: str = SHARE
    unit: str = SHARE_UNIT
    options: tuple[Option, ...] = ()
    computes_logits: bool = False
    needs_gates: bool = False
    takes_sinks: bool = False
    caches_scores: bool = False
    cached_layers: float = 0.0
    is_bounded: bool = False

    @abstractmethod
    def measure(
        self,
        model: PreTrainedModel,
        blocks: TokenBlocks,
        window: int,
        *,
        name: str,
        metadata: dict[str, Any] | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> HeadScores:
        """Measure the signal; the model is as before afterwards. Called on all ranks of torchrun.

        Args:
            model: any supported decoder.
            blocks: held-out text.
            window: number of recent keys a local head sees, including the query's own key.
            name: name of the table.
            metadata: provenance of the model and the text, to store in the table.
            progress: called with (blocks or steps done, total).
            options: values by the names in ``self.options``; those that the user left out are absent.
        """

    def table(self, means: Sequence[HeadMeans], window: int, **facts: Any) -> HeadScores:
        """Build the table of measured means; ``facts`` are ``passes``, ``tokens``, ``name`` and ``metadata``."""
        from spkv_nas.probing.heads import signal_table

        return signal_table(self.name, means, window, kind=self.kind, unit=self.unit, **facts)

    def work(self, grid: Grid, tokens: int, block_size: int, **options: Any) -> Work:
        """Return the cost, one pass by default.

        Args:
            grid: (layers, KV heads).
            tokens: tokens of the text.
            block_size: tokens per block.
            options: values of options; those absent have their defaults.
        """
        return Work(1.0, tokens)

    def cost(self, stages: Stages, tokens: int, **options: Any) -> StageCost:
        """Return the memory and FLOPs of measuring on ``tokens`` tokens; arguments as in ``work``."""
        work = self.work(stages.size.heads.grid, tokens, stages.block_size, **options)
        return stages.measure(
            self.stage_name, work.tokens, work.passes, scored=self.computes_logits, shares=self.cached_layers
        )

    @property
    def stage_name(self) -> str:
        """Return the name of its stage in a plan."""
        return f"signal {self.name}{', at most' if self.is_bounded else ''}"

    def option(self, name: str) -> Option | None:
        """Return the option of a name; None if the signal does not take it."""
        return next((option for option in self.options if option.name == name), None)

    def measures(self, name: str) -> bool:
        """Return whether ``measure`` takes an option."""
        option = self.option(name)
        return option is not None and option.is_measured
