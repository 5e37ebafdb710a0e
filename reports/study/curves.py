"""What the signals that learn on a frozen model need, and where their choice holds: one setting per cell, as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from cells import Cell
from choosers import RULES
from judging import score
from references import Subject
from signals import learn_and_probe

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.signals import HEAD_GATES
from spkv_nas.base.files import write_json
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.probing import head_gates
from spkv_nas.proposal.propose import propose, resolve_tau


@dataclass(frozen=True)
class Setting:
    """How a signal learns on the frozen model."""

    signal: str
    steps: int
    step_tokens: int
    block_size: int
    window: int
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
        length = f"steps-{self.steps}x{self.step_tokens}-block-{self.block_size}"
        return f"{self.signal}-{length}-window-{self.window}-seed-{self.seed}"


def curve_file(subject: Subject, setting: Setting) -> Path:
    """Of a setting's result."""
    return subject.folder / "curves" / f"{setting.name}.json"


def settings(subject: Subject) -> list[Setting]:
    """All settings: steps and tokens at the plan's length and window, then these one at a time; the base setting of
    every signal and seed first."""
    asked = subject.plan.curves
    found = []
    for seed, signal in product(asked.seeds, asked.signals):
        plain = _base(subject, signal, seed)
        found += [plain]
        found += [replace(plain, steps=steps, step_tokens=few) for few in asked.step_tokens for steps in asked.steps]
        found += [replace(plain, block_size=size) for size in asked.block_sizes]
        found += [replace(plain, window=window) for window in asked.windows]
    return list(dict.fromkeys(found))


def curve_cells(subject: Subject) -> Iterator[Cell]:
    """A cell per setting."""
    for setting in settings(subject):
        title = f"{subject.name}: {setting.name}"
        yield Cell("curve", title, curve_file(subject, setting), partial(_measure, subject, setting))


def _base(subject: Subject, signal: str, seed: int) -> Setting:
    plan = subject.plan
    steps, tokens = plan.frozen.steps, plan.frozen.step_tokens
    if signal == HEAD_GATES:
        steps, tokens = plan.head_gates_steps, head_gates.STEP_TOKENS
    return Setting(signal, steps, tokens, subject.recipe.data.block_size, subject.plan.window, seed)


def _learn(subject: Subject, setting: Setting, heads: int) -> HeadScores:
    chosen = subject.parts[0].cut(setting.block_size)
    how: dict[str, Any] = {"steps": setting.steps, "step_tokens": setting.step_tokens, "seed": setting.seed}
    if setting.signal == HEAD_GATES:
        with subject.reporter.bar(setting.name) as progress:
            return head_gates.head_gates(
                subject.model(), chosen, setting.window, budget=heads, progress=progress, **how
            )  # fmt: skip
    train = subject.trunk.corpus.train.cut(setting.block_size)
    table, _ = learn_and_probe(
        subject, heads, train=train, chosen=chosen, window=setting.window, name=setting.name, **how
    )  # fmt: skip
    return resolve_tau(table, subject.plan.curves.tau, heads)


def _measure(subject: Subject, setting: Setting) -> None:
    """Learn, choose, and judge at the setting's length and window: its own choice, the base setting's, and a rule's."""
    heads = subject.heads(subject.plan.curves.budget)
    table = _learn(subject, setting, heads)
    layout = propose(table, heads, window=setting.window, num_random=0)["densest"]
    layout.write(_layout_file(subject, setting))
    base = _layout_file(subject, _base(subject, setting.signal, setting.seed))
    layouts = {
        "own": layout,
        "base": Layout(Layout.read(base).heads, setting.window),
        "rule": Layout.from_mask(RULES["B"](*subject.grid, heads), window=setting.window),
    }
    size = None if setting.block_size == subject.recipe.data.block_size else setting.block_size
    full = score(subject, None, size)
    change = {name: paired_difference(score(subject, one, size), full) for name, one in layouts.items()}
    shared = int(np.logical_and(layouts["own"].global_mask, layouts["base"].global_mask).sum())
    result = {
        **asdict(setting),
        "heads": heads,
        "mean_density": table.mean,
        "shared_with_base": shared,
        "full_nll": full.mean,
        **{f"{name}_delta_nll_percent": one.percent for name, one in change.items()},
        **{f"{name}_standard_error": one.standard_error for name, one in change.items()},
    }
    write_json(curve_file(subject, setting), result)


def _layout_file(subject: Subject, setting: Setting) -> Path:
    return curve_file(subject, setting).with_suffix(".yaml")
