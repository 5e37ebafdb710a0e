"""Signals that ``probe --signal`` measures; the modules that compute them are imported when they are measured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from spkv_nas.artifacts import defaults, kinds
from spkv_nas.artifacts.grid import Grid
from spkv_nas.base import flag, limits, registry
from spkv_nas.probing.signal import GRANULARITIES, HEAD, Budget, Seed, Signal, Steps, Work
from spkv_nas.proposal.budget import PAPER_BUDGET

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.cost.stage_costs import StageCost, Stages

_TAU = flag.Flag("Gate threshold in [0, 1]; a higher one keeps fewer keys.")
_ABLATION_TOKENS = flag.Flag(
    "Tokens for the add-one-head ablation that validates the ranking; 0 skips it.", low=0, high=limits.MAX_WHOLE
)
_GRANULARITY = flag.Flag("Choose single heads, or only whole layers.", metavar="head|layer", values=GRANULARITIES)
_MAX_HEADS = flag.Flag(
    "Maximum number of heads to measure individually, in the layers that gain most.", low=1, high=limits.MAX_SIZE
)


@dataclass(frozen=True)
class Density(Signal):
    """Share of keys that the gates keep; on a model without gates, ``probe`` trains them first."""

    name, help = "density", "share of keys that SP-KV gates keep"
    kind, unit = kinds.DENSITY, kinds.DENSITY_UNIT
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

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> "HeadScores":
        """Measure the density at ``tau``; the window is that of the gates."""
        from spkv_nas.probing.density import probe

        return probe(model, blocks, tau=self.tau, **run)

    def cost(self, stages: "Stages", tokens: int) -> "StageCost":
        """Return the cost of a pass with gates and without logits."""
        return stages.measure(self.stage_name, tokens, gated=True, scored=False)


@dataclass(frozen=True)
class Ablation(Signal):
    """Gain of each head, switched alone."""

    kind, unit = kinds.GAIN, kinds.NATS
    computes_logits, takes_sinks, cached_layers = True, True, 1.0
    # True to make heads global in an all-local model, False to make them local in an all-global one
    opens: ClassVar[bool]

    granularity: Annotated[str, _GRANULARITY] = HEAD
    max_heads: Annotated[int | None, _MAX_HEADS] = flag.default(None, "all")

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> "HeadScores":
        """Measure the gains with ``granularity`` and ``max_heads``."""
        from spkv_nas.probing.gains import gains

        options: dict[str, Any] = {"granularity": self.granularity, "max_heads": self.max_heads}
        return gains(self.name, model, blocks, window, opens=self.opens, **options, **run)

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

    name, help = "add-one-head", "NLL saved by making one head global in an all-local model"
    opens = True


@dataclass(frozen=True)
class LeaveOneOut(Ablation):
    """Make single heads local in an all-global model."""

    name, help = "leave-one-out", "NLL lost by making one head local in an all-global model"
    opens = False


@dataclass(frozen=True)
class Duo(Signal):
    """Share of full attention that each head needs to preserve the last hidden states."""

    name, help = "duo", "DuoAttention's learned share of full attention"
    unit = kinds.ALPHA_UNIT
    takes_sinks = True

    steps: Steps = defaults.DUO_STEPS
    seed: Seed = 0

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> "HeadScores":
        """Learn alpha with ``steps`` and ``seed``."""
        from spkv_nas.probing.duo import duo

        return duo(model, blocks, window, steps=self.steps, seed=self.seed, **run)

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes over the blocks of a step."""
        return Work(self.steps, min(tokens, defaults.DUO_STEP_BLOCKS * block_size), defaults.FROZEN_STEP_PASSES)

    def cost(self, stages: "Stages", tokens: int) -> "StageCost":
        """Return the cost of training alphas on a frozen model."""
        return stages.learn_gates(self.stage_name, self.steps, defaults.DUO_STEP_BLOCKS * stages.block_size, mixes=2)


@dataclass(frozen=True)
class HeadGates(Signal):
    """Gate that each head learns while the gates of all heads sum to the budget."""

    name, help = "head-gates", "one gate per head, learned under a budget"
    unit = kinds.GATE_UNIT
    takes_sinks = True

    steps: Steps = defaults.HEAD_GATE_STEPS
    budget: Budget = flag.default(None, PAPER_BUDGET)
    seed: Seed = 0

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> "HeadScores":
        """Learn the gates with ``steps``, ``budget`` and ``seed``; ``sinks`` is 0 by default, not measured again."""
        from spkv_nas.probing.head_gates import head_gates

        options: dict[str, Any] = {"steps": self.steps, "budget": self.budget, "seed": self.seed}
        return head_gates(model, blocks, window, **{"sinks": 0, **options, **run})

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes over the tokens of a step."""
        return Work(self.steps, defaults.LEARNING_TOKENS, defaults.FROZEN_STEP_PASSES)

    def cost(self, stages: "Stages", tokens: int) -> "StageCost":
        """Return the cost of training gates of heads on a frozen model."""
        return stages.learn_gates(self.stage_name, self.steps, defaults.LEARNING_TOKENS, mixes=2)


@dataclass(frozen=True)
class WindowCosts(Signal):
    """Cost of every window of local heads, from which layouts of one or several windows are made for any budget."""

    name, help = "window-costs", "what each window costs each head, for layouts within a memory budget"
    kind, unit = kinds.GAIN, kinds.NATS
    takes_sinks = True

    seed: Seed = 0

    def measure(self, model: Any, blocks: Any, window: int, **run: Any) -> "HeadScores":
        """Measure the costs of ``window`` and of the default windows."""
        from spkv_nas.probing.window_costs import window_costs

        return window_costs(model, blocks, window, seed=self.seed, **run)

    def work(self, grid: Grid, tokens: int, block_size: int) -> Work:
        """Return the passes over the blocks that are measured."""
        from spkv_nas.probing.window_costs import NUM_BLOCKS, WINDOWS, passes

        return Work(1.0, min(tokens, NUM_BLOCKS * block_size), passes(len(WINDOWS)))

    def cost(self, stages: "Stages", tokens: int) -> "StageCost":
        """Return the cost of gradients of a frozen model with respect to its heads."""
        from spkv_nas.probing.window_costs import NUM_BLOCKS, WINDOWS

        return stages.learn_gates(self.stage_name, NUM_BLOCKS, stages.block_size, mixes=len(WINDOWS) + 1)


DENSITY = Density()
HEAD_GATES = HeadGates()
ADD_ONE_HEAD, LEAVE_ONE_OUT = AddOneHead(), LeaveOneOut()
DUO = Duo()
WINDOW_COSTS = WindowCosts()
SIGNALS: registry.Registry[Signal] = registry.Registry(
    "spkv_nas.signals",
    "signal",
    Signal,  # type: ignore[type-abstract]
    (DENSITY, HEAD_GATES, ADD_ONE_HEAD, LEAVE_ONE_OUT, DUO, WINDOW_COSTS),
)
