"""Measure the signals of a reference, each a density table in its own folder that also records its cost.

Cost is counted in forward-pass tokens. A training step counts three times its tokens (forward, and twice for backward),
a step on a frozen model twice (no weight gradients); scoring layouts and attending report their own passes, where
shared layers count once.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from references import Subject

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.probing.density import probe
from spkv_nas.probing.measure import measure_signal
from spkv_nas.probing.priced import learn_gates
from spkv_nas.probing.registry import SIGNALS
from spkv_nas.training.variants import Variant

PRICED, FROZEN, UNPRICED, LONG = DENSITIES = ("priced-trained", "priced-frozen", "unpriced", "unpriced-long")
HEAD_GATES, OPENING, CLOSING, REGRESSION, DUO = "head-gates", "opening", "closing", "regression", "duo"
ONCE = (OPENING, CLOSING, DUO, "retrieval", "attention-mass")  # independent of the budget
COST, SECONDS = "forward_tokens", "cpu_seconds"  # metadata keys of a table
_TRAINED, _FROZEN_STEP = 3, 2  # cost of a step in forward passes
_MAX_DENSE = 0.99  # maximum target density

Measured = tuple[HeadScores, float]  # table, cost


@dataclass(frozen=True)
class Signal:
    """A signal to measure; ``heads`` is the budget it depends on, None if it depends on none."""

    name: str
    heads: int | None
    measure: Callable[[Subject], Measured]

    def folder(self, subject: Subject) -> Path:
        """Return the folder of its table."""
        return signal_folder(subject, self.name, self.heads)

    def write(self, subject: Subject) -> None:
        """Measure the signal and write its table with the cost."""
        start = time.process_time()
        table, cost = self.measure(subject)
        facts = {COST: round(cost), SECONDS: round(time.process_time() - start, 1)}
        replace(table, metadata={**table.metadata, **facts}).write(self.folder(subject))


def signal_folder(subject: Subject, name: str, heads: int | None) -> Path:
    """Return the folder of a signal's table; ``heads`` is ignored for signals independent of the budget."""
    once = heads is None or name in (*ONCE, UNPRICED, LONG)
    return subject.folder / "signals" / (name if once else f"{name}-{heads}")


def signals(subject: Subject, budgets: list[int]) -> list[Signal]:
    """Return all signals of a reference: cheap ones first, then those of each budget."""
    all_signals = [Signal(name, None, partial(_other, name=name)) for name in ONCE]
    for number, heads in enumerate(budgets):
        all_signals.append(Signal(FROZEN, heads, partial(_frozen, heads=heads)))
        all_signals.append(Signal(PRICED, heads, partial(_trained, heads=heads)))
        if number == 0:
            all_signals.append(Signal(UNPRICED, None, _trained))
            if subject.plan.references[subject.name].unpriced_long is not None:
                all_signals.append(Signal(LONG, None, _long))
        all_signals += [
            Signal(name, heads, partial(_other, name=name, heads=heads)) for name in (HEAD_GATES, REGRESSION)
        ]
    return all_signals


def share(subject: Subject, heads: int) -> float:
    """Return the share of global heads, which is the target density of gates trained for that budget."""
    return min(heads / math.prod(subject.grid), _MAX_DENSE)


def learn_and_probe(
    subject: Subject,
    heads: int,
    *,
    train: TokenBlocks,
    chosen: TokenBlocks,
    window: int,
    steps: int,
    step_tokens: int,
    seed: int,
    name: str = FROZEN,
) -> Measured:
    """Learn gates on the frozen model at the price of ``heads`` global heads, and probe them.

    Args:
        subject: the reference.
        heads: budget in global heads.
        train: text to learn on.
        chosen: text to probe on.
        window: local attention window in tokens.
        steps: number of training steps.
        step_tokens: tokens per step.
        seed: random seed.
        name: name of the table.

    Returns:
        The table and its cost in forward-pass tokens.
    """
    # Learn gates; interrupted training resumes from its state
    model = subject.model()
    config = GateConfig(window=window, target_density=share(subject, heads))
    state = subject.folder / "state" / f"{name}-{heads}"
    with subject.reporter.bar(f"{name}, learning gates") as progress:
        learned = learn_gates(
            model, train, config, steps=steps, step_tokens=step_tokens, seed=seed, state=state, progress=progress
        )
    # Probe them
    table = probe(model, chosen, name=name, metadata={"model": subject.name, **learned.as_mapping()})
    shutil.rmtree(state)
    return table, _FROZEN_STEP * learned.tokens + chosen.tokens.size


def _frozen(subject: Subject, heads: int) -> Measured:
    """Measure priced gates on the frozen model."""
    plan, train = subject.plan, subject.context.corpus.train
    training = plan.frozen.model_dump()
    return learn_and_probe(subject, heads, train=train, chosen=subject.parts[0], window=plan.window, seed=0, **training)


def _trained(subject: Subject, heads: int | None = None) -> Measured:
    """Measure gates trained with the model, at the price of ``heads``, or without a price if None."""
    plan = subject.plan
    gates = plan.unpriced if heads is None else {**plan.priced, "target_density": share(subject, heads)}
    context = subject.trunk_of(gates=gates)
    branch = context.train(Variant.sp_kv())
    num_tokens = branch.steps * context.recipe.branch.batch_size * context.recipe.data.block_size
    return _probed(subject, branch.checkpoint, UNPRICED if heads is None else PRICED, _TRAINED * num_tokens)


def _long(subject: Subject) -> Measured:
    """Measure gates that were already trained for long without a price."""
    long = subject.plan.references[subject.name].unpriced_long
    assert long is not None
    return _probed(subject, long.checkpoint, LONG, _TRAINED * long.tokens)


def _probed(subject: Subject, checkpoint: str | Path, name: str, cost: int) -> Measured:
    """Probe a checkpoint, and add the cost of the probe to that of its training."""
    chosen = subject.parts[0]
    with subject.reporter.bar(f"{name}, probing") as progress:
        table = probe(subject.model(checkpoint), chosen, name=name, metadata={"model": subject.name}, progress=progress)
    return table, cost + chosen.tokens.size


def _other(subject: Subject, name: str, heads: int | None = None) -> Measured:
    """Measure one of the library's signals."""
    plan, blocks = subject.plan, subject.parts[0]
    if SIGNALS[name].computes_logits:
        blocks = blocks.spread(max(1, plan.scored_on // blocks.block_size))
    signal_options: dict[str, Any] = {}
    if name == REGRESSION:
        signal_options = {"budget": heads, "num_layouts": plan.regression_layouts}
    elif name == HEAD_GATES:
        signal_options = {"budget": heads, "steps": plan.head_gates_steps}
    elif name == DUO:
        signal_options = {"steps": plan.duo_steps}
    with subject.reporter.bar(name) as progress:
        table = measure_signal(
            name,
            subject.model(),
            blocks,
            window=plan.window,
            name=name,
            metadata={"model": subject.name},
            progress=progress,
            **signal_options,
        )
    return table, table.metadata["passes"] * table.metadata["tokens"]
