"""Signals of a reference, each a density table in a folder of its own that also says what it cost.

Cost is counted in tokens that pass forward through the model. A training step counts three times its tokens (forward,
and twice as much back), one that learns on a frozen model twice (no gradients of weights), and whatever scores layouts
or attends says its own passes, where layers that are shared count once.
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
from spkv_nas.artifacts.signals import DUO, HEAD_GATES, SCORING
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.probing.density import probe
from spkv_nas.probing.priced import learn_gates
from spkv_nas.probing.signals import measure_signal
from spkv_nas.training.variants import Variant

PRICED, FROZEN, UNPRICED, LONG = DENSITIES = ("priced-trained", "priced-frozen", "unpriced", "unpriced-long")
OPENING, CLOSING, REGRESSION = SCORING
ONCE = (OPENING, CLOSING, DUO, "retrieval", "attention-mass")  # that do not depend on the budget
COST, SECONDS = "forward_tokens", "cpu_seconds"  # of a table's metadata
_TRAINED, _FROZEN_STEP = 3, 2  # forward passes that a step is worth
_MOST_DENSE = 0.99  # target density

Measured = tuple[HeadScores, float]  # and its cost


@dataclass(frozen=True)
class Signal:
    """A signal to measure; ``heads`` is the budget that it depends on, None for any."""

    name: str
    heads: int | None
    measure: Callable[[Subject], Measured]

    def folder(self, subject: Subject) -> Path:
        """Of its table."""
        return signal_folder(subject, self.name, self.heads)

    def write(self, subject: Subject) -> None:
        """Measure it, and write its table."""
        start = time.process_time()
        table, cost = self.measure(subject)
        facts = {COST: round(cost), SECONDS: round(time.process_time() - start, 1)}
        replace(table, metadata={**table.metadata, **facts}).write(self.folder(subject))


def signal_folder(subject: Subject, name: str, heads: int | None) -> Path:
    """Of a signal's table; of one that does not depend on the budget whatever ``heads``."""
    once = heads is None or name in (*ONCE, UNPRICED, LONG)
    return subject.folder / "signals" / (name if once else f"{name}-{heads}")


def signals(subject: Subject, budgets: list[int]) -> list[Signal]:
    """All signals of a reference: cheap ones first, then those of the first budget, and so on."""
    found = [Signal(name, None, partial(_other, name=name)) for name in ONCE]
    for number, heads in enumerate(budgets):
        found.append(Signal(FROZEN, heads, partial(_frozen, heads=heads)))
        found.append(Signal(PRICED, heads, partial(_trained, heads=heads)))
        if number == 0:
            found.append(Signal(UNPRICED, None, _trained))
            if subject.plan.references[subject.name].unpriced_long is not None:
                found.append(Signal(LONG, None, _long))
        found += [Signal(name, heads, partial(_other, name=name, heads=heads)) for name in (HEAD_GATES, REGRESSION)]
    return found


def share(subject: Subject, heads: int) -> float:
    """Of the heads; the target density of gates that are priced for them."""
    return min(heads / math.prod(subject.grid), _MOST_DENSE)


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
    """The frozen lane: gates learn on ``train`` at the price of ``heads``, and are probed on ``chosen``."""
    model = subject.model()
    config = GateConfig(window=window, target_density=share(subject, heads))
    state = subject.folder / "state" / f"{name}-{heads}"
    with subject.reporter.bar(f"{name}, learning gates") as progress:
        learned = learn_gates(
            model, train, config, steps=steps, step_tokens=step_tokens, seed=seed, state=state, progress=progress
        )
    table = probe(model, chosen, name=name, metadata={"model": subject.name, **learned.as_mapping()})
    shutil.rmtree(state)
    return table, _FROZEN_STEP * learned.tokens + chosen.tokens.size


def _frozen(subject: Subject, heads: int) -> Measured:
    plan, train = subject.plan, subject.trunk.corpus.train
    how = plan.frozen.model_dump()
    return learn_and_probe(subject, heads, train=train, chosen=subject.parts[0], window=plan.window, seed=0, **how)


def _trained(subject: Subject, heads: int | None = None) -> Measured:
    """A branch with gates, at the price of ``heads`` or without one."""
    plan = subject.plan
    gates = plan.unpriced if heads is None else {**plan.priced, "target_density": share(subject, heads)}
    trunk = subject.trunk_of(gates=gates)
    branch = trunk.train(Variant.sp_kv())
    seen = branch.steps * trunk.recipe.branch.batch_size * trunk.recipe.data.block_size
    return _probed(subject, branch.checkpoint, UNPRICED if heads is None else PRICED, _TRAINED * seen)


def _long(subject: Subject) -> Measured:
    long = subject.plan.references[subject.name].unpriced_long
    assert long is not None
    return _probed(subject, long.checkpoint, LONG, _TRAINED * long.tokens)


def _probed(subject: Subject, checkpoint: str | Path, name: str, cost: int) -> Measured:
    chosen = subject.parts[0]
    with subject.reporter.bar(f"{name}, probing") as progress:
        table = probe(subject.model(checkpoint), chosen, name=name, metadata={"model": subject.name}, progress=progress)
    return table, cost + chosen.tokens.size


def _other(subject: Subject, name: str, heads: int | None = None) -> Measured:
    plan, blocks = subject.plan, subject.parts[0]
    if name in SCORING:
        blocks = blocks.spread(max(1, plan.scored_on // blocks.block_size))
    own: dict[str, Any] = {}
    if name == REGRESSION:
        own = {"budget": heads, "num_layouts": plan.regression_layouts}
    elif name == HEAD_GATES:
        own = {"budget": heads, "steps": plan.head_gates_steps}
    elif name == DUO:
        own = {"steps": plan.duo_steps}
    with subject.reporter.bar(name) as progress:
        table = measure_signal(
            name, subject.model(), blocks, window=plan.window, name=name, metadata={"model": subject.name},
            progress=progress, **own,
        )  # fmt: skip
    return table, table.metadata["passes"] * table.metadata["tokens"]
