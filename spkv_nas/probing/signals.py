"""Define what a signal is, a score of every KV head by its need for global attention, and the built-in ones.

A signal is one class that carries everything the commands need to know about it, its options included (see
``base.registry``). ``probe --help``, ``--dry-run``, ``plan``, the tables and the report are made from it. A package
adds its own by an entry point of the group ``spkv_nas.signals`` (docs/tutorials/extend.md)::

    @dataclass(frozen=True)
    class ValueNorm(Signal):
        name, help = "value-norm", "mean norm of a head's values"
        kind, unit = SCORE, "norm"

        def measure(self, model, blocks, window, *, name, metadata=None, progress=None):
            ...
            return self.table(means, window, ...)

A module of a signal is imported by every ``--help``, so it must import torch inside its functions; the modules that
compute built-in signals are imported when they are measured.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from spkv_nas.artifacts import defaults, kinds
from spkv_nas.artifacts.grid import Grid
from spkv_nas.base import errors, flag, limits, registry
from spkv_nas.proposal.budget import PAPER_BUDGET

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

SINKS = flag.Flag(
    "Sink tokens: first tokens of a sequence that a local head sees besides its window. auto: 0, "
    "1, 2 or 4, by the model's measured attention on first tokens; a layout or gates of the model "
    "keep their own number.",
    metavar="auto|N",
)
_TAU = flag.Flag("Gate threshold in [0, 1]; a higher one keeps fewer keys.")
_ABLATION_TOKENS = flag.Flag(
    "Tokens for the add-one-head ablation that validates the ranking; 0 skips it.",
    low=0,
    high=limits.MAX_WHOLE,
)
_GRANULARITY = flag.Flag(
    "Choose single heads, or only whole layers.", metavar="head|layer", values=kinds.GRANULARITIES
)
_MAX_HEADS = flag.Flag(
    "Maximum number of heads to measure individually, in the layers that gain most.",
    low=1,
    high=limits.MAX_SIZE,
)


@dataclass(frozen=True)
class Work:
    """Cost of a signal: ``passes`` over ``tokens`` tokens, each as expensive as ``effort`` forward passes."""

    passes: float
    tokens: int
    effort: float = 1.0


class Signal(registry.Entry, ABC):
    """Score of every KV head, higher for heads that need global attention."""

    kind: ClassVar[str] = kinds.SHARE  # kind of the scores, one of ``artifacts.kinds.KINDS``
    unit: ClassVar[str] = kinds.SHARE_UNIT  # unit of the scores
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
    # Share of the layers whose hidden states stay in memory between passes
    cached_layers: ClassVar[float] = 0.0
    is_bounded: ClassVar[bool] = False  # whether ``work`` is an upper bound

    @abstractmethod
    def measure(
        self,
        model: "PreTrainedModel",
        blocks: "TokenBlocks",
        window: int,
        *,
        name: str,
        metadata: dict[str, object] | None = None,
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
            self.stage_name,
            work.tokens,
            work.passes,
            scored=self.computes_logits,
            shares=self.cached_layers,
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
        raise errors.UserError(
            f"--sinks must be auto or a number of tokens up to {limits.MAX_WINDOW}; found '{text}'"
        )
    return int(str(text))


@dataclass(frozen=True)
class Density(Signal):
    """Share of keys that the gates keep; on a model without gates, ``probe`` trains them first."""

    name = "density"
    help = "share of keys that SP-KV gates keep"
    kind = kinds.DENSITY
    unit = kinds.DENSITY_UNIT
    needs_gates = True
    stage_name = "probe"
    reads_blocks = False  # the gates have their own window, and open gates have a density, too
    used_by_command = ("ablation_tokens", "steps", "budget", "seed")

    tau: Annotated[float | None, _TAU] = flag.default(None, "the checkpoint's")
    ablation_tokens: Annotated[int, _ABLATION_TOKENS] = defaults.ABLATION_TOKENS
    # Of the gates that a model has yet to learn
    steps: Steps = defaults.PRICED_STEPS
    budget: Budget = flag.default(None, PAPER_BUDGET)
    seed: Seed = 0

    def measure(
        self, model: "PreTrainedModel", blocks: "TokenBlocks", window: int, **run: Any
    ) -> "HeadScores":
        """Measure the density at ``tau``; the window is that of the gates."""
        from spkv_nas.probing.density import probe

        return probe(model, blocks, tau=self.tau, **run)

    def cost(self, stages: "Stages", tokens: int) -> "StageCost":
        """Return the cost of a pass with gates and without logits."""
        return stages.measure(self.stage_name, tokens, gated=True, scored=False)


@dataclass(frozen=True)
class Ablation(Signal):
    """Gain of each head, switched alone."""

    kind = kinds.GAIN
    unit = kinds.NATS
    computes_logits = True
    takes_sinks = True
    cached_layers = 1.0
    # True to make heads global in an all-local model, False to make them local in an all-global one
    opens: ClassVar[bool]

    granularity: Annotated[str, _GRANULARITY] = kinds.HEAD
    max_heads: Annotated[int | None, _MAX_HEADS] = flag.default(None, "all")

    def measure(
        self, model: "PreTrainedModel", blocks: "TokenBlocks", window: int, **run: Any
    ) -> "HeadScores":
        """Measure the gains with ``granularity`` and ``max_heads``."""
        from spkv_nas.probing.gains import gains

        return gains(
            self.name,
            model,
            blocks,
            window,
            opens=self.opens,
            granularity=self.granularity,
            max_heads=self.max_heads,
            **run,
        )

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes that all heads take, measured singly."""
        return Work(ablation_passes(grid), tokens)


def ablation_passes(grid: Grid) -> float:
    """Return the forward passes needed to measure every head of a (layers, KV heads) grid, including the baseline."""
    num_layers, num_heads = grid
    return 1.0 + (num_layers + 1) / 2 * num_heads


@dataclass(frozen=True)
class AddOneHead(Ablation):
    """Make single heads global in an all-local model."""

    name = "add-one-head"
    help = "NLL saved by making one head global in an all-local model"
    opens = True


@dataclass(frozen=True)
class LeaveOneOut(Ablation):
    """Make single heads local in an all-global model."""

    name = "leave-one-out"
    help = "NLL lost by making one head local in an all-global model"
    opens = False


@dataclass(frozen=True)
class Duo(Signal):
    """Share of full attention that each head needs to preserve the last hidden states."""

    name = "duo"
    help = "DuoAttention's learned share of full attention"
    unit = kinds.ALPHA_UNIT
    takes_sinks = True

    steps: Steps = defaults.DUO_STEPS
    seed: Seed = 0

    def measure(
        self, model: "PreTrainedModel", blocks: "TokenBlocks", window: int, **run: Any
    ) -> "HeadScores":
        """Learn alpha with ``steps`` and ``seed``."""
        from spkv_nas.probing.duo import duo

        return duo(model, blocks, window, steps=self.steps, seed=self.seed, **run)

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes over the blocks of a step."""
        step_tokens = min(tokens, defaults.DUO_STEP_BLOCKS * block_size)
        return Work(self.steps, step_tokens, defaults.FROZEN_STEP_PASSES)

    def cost(self, stages: "Stages", tokens: int) -> "StageCost":
        """Return the cost of training alphas on a frozen model."""
        step_tokens = defaults.DUO_STEP_BLOCKS * stages.block_size
        return stages.learn_gates(self.stage_name, self.steps, step_tokens, mixes=2)


@dataclass(frozen=True)
class HeadGates(Signal):
    """Gate that each head learns while the gates of all heads sum to the budget."""

    name = "head-gates"
    help = "one gate per head, learned under a budget"
    unit = kinds.GATE_UNIT
    takes_sinks = True

    steps: Steps = defaults.HEAD_GATE_STEPS
    budget: Budget = flag.default(None, PAPER_BUDGET)
    seed: Seed = 0

    def measure(
        self, model: "PreTrainedModel", blocks: "TokenBlocks", window: int, **run: Any
    ) -> "HeadScores":
        """Learn the gates with ``steps``, ``budget`` and ``seed``; ``sinks`` is 0 by default, not measured again."""
        from spkv_nas.probing.head_gates import head_gates

        run.setdefault("sinks", 0)
        return head_gates(
            model,
            blocks,
            window,
            steps=self.steps,
            budget=self.budget,
            seed=self.seed,
            **run,
        )

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes over the tokens of a step."""
        return Work(self.steps, defaults.LEARNING_TOKENS, defaults.FROZEN_STEP_PASSES)

    def cost(self, stages: "Stages", tokens: int) -> "StageCost":
        """Return the cost of training gates of heads on a frozen model."""
        return stages.learn_gates(self.stage_name, self.steps, defaults.LEARNING_TOKENS, mixes=2)


@dataclass(frozen=True)
class WindowCosts(Signal):
    """Cost of every window of local heads, from which layouts of one or several windows are made for any budget."""

    name = "window-costs"
    help = "what each window costs each head, for layouts within a memory budget"
    kind = kinds.GAIN
    unit = kinds.NATS
    takes_sinks = True

    seed: Seed = 0

    def measure(
        self, model: "PreTrainedModel", blocks: "TokenBlocks", window: int, **run: Any
    ) -> "HeadScores":
        """Measure the costs of ``window`` and of the default windows."""
        from spkv_nas.probing.window_costs import window_costs

        return window_costs(model, blocks, window, seed=self.seed, **run)

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes over the blocks that are measured."""
        from spkv_nas.probing.window_costs import measured_windows, passes, usual_blocks

        num_blocks = max(1, min(tokens // block_size, usual_blocks(block_size)))
        num_windows = len(measured_windows(block_size))
        return Work(1.0, num_blocks * block_size, effort=passes(num_windows, num_blocks))

    def cost(self, stages: "Stages", tokens: int) -> "StageCost":
        """Return the cost of gradients of a frozen model with respect to its heads."""
        from spkv_nas.probing.window_costs import (
            MOST_BLOCKS,
            measured_windows,
            passes,
            usual_blocks,
        )

        num_windows = len(measured_windows(stages.block_size))
        num_blocks = usual_blocks(stages.block_size)
        # Fewer blocks have more draws each
        effort = passes(num_windows, num_blocks) / passes(num_windows, MOST_BLOCKS)
        steps = round(num_blocks * effort)
        # Every layer mixes the windows and global attention
        return stages.learn_gates(self.stage_name, steps, stages.block_size, mixes=num_windows + 1)


DENSITY = Density()
ADD_ONE_HEAD = AddOneHead()
WINDOW_COSTS = WindowCosts()
SIGNALS: registry.Registry[Signal] = registry.Registry(
    "spkv_nas.signals",
    "signal",
    Signal,  # type: ignore[type-abstract]
    (DENSITY, HeadGates(), ADD_ONE_HEAD, LeaveOneOut(), Duo(), WINDOW_COSTS),
)
