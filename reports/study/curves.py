"""Measure how signals that learn on a frozen model depend on their settings: one setting per cell, as JSON."""

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
from signals import HEAD_GATES, learn_and_probe

from spkv_nas.artifacts.defaults import LEARNING_TOKENS
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import write_json
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.probing.head_gates import head_gates
from spkv_nas.proposal.propose import propose, resolve_tau


@dataclass(frozen=True)
class Setting:
    """Training setting of a signal on the frozen model."""

    signal: str
    steps: int
    step_tokens: int
    block_size: int
    window: int
    seed: int

    @property
    def name(self) -> str:
        """Return the name of its file."""
        length = f"steps-{self.steps}x{self.step_tokens}-block-{self.block_size}"
        return f"{self.signal}-{length}-window-{self.window}-seed-{self.seed}"


def curve_file(subject: Subject, setting: Setting) -> Path:
    """Return the file of a setting's result."""
    return subject.folder / "curves" / f"{setting.name}.json"


def settings(subject: Subject) -> list[Setting]:
    """Return all settings, starting with the base setting of each signal and seed.

    These are all combinations of steps and tokens, then other block sizes and windows one at a time.
    """
    curves = subject.plan.curves
    all_settings = []
    for seed, signal in product(curves.seeds, curves.signals):
        base = _base(subject, signal, seed)
        all_settings += [base]
        all_settings += [
            replace(base, steps=steps, step_tokens=tokens) for tokens in curves.step_tokens for steps in curves.steps
        ]
        all_settings += [replace(base, block_size=size) for size in curves.block_sizes]
        all_settings += [replace(base, window=window) for window in curves.windows]
    return list(dict.fromkeys(all_settings))


def curve_cells(subject: Subject) -> Iterator[Cell]:
    """Yield a cell per setting."""
    for setting in settings(subject):
        title = f"{subject.name}: {setting.name}"
        yield Cell("curve", title, curve_file(subject, setting), partial(_measure, subject, setting))


def _base(subject: Subject, signal: str, seed: int) -> Setting:
    """Return the base setting of a signal and seed."""
    plan = subject.plan
    steps, tokens = plan.frozen.steps, plan.frozen.step_tokens
    if signal == HEAD_GATES:
        steps, tokens = plan.head_gates_steps, LEARNING_TOKENS
    return Setting(signal, steps, tokens, subject.recipe.data.block_size, subject.plan.window, seed)


def _learn(subject: Subject, setting: Setting, heads: int) -> HeadScores:
    """Learn the signal with a setting; return its table."""
    chosen = subject.parts[0].cut(setting.block_size)
    training: dict[str, Any] = {"steps": setting.steps, "step_tokens": setting.step_tokens, "seed": setting.seed}
    if setting.signal == HEAD_GATES:
        with subject.reporter.bar(setting.name) as progress:
            return head_gates(subject.model(), chosen, setting.window, budget=heads, progress=progress, **training)
    train = subject.context.corpus.train.cut(setting.block_size)
    table, _ = learn_and_probe(
        subject, heads, train=train, chosen=chosen, window=setting.window, name=setting.name, **training
    )
    return resolve_tau(table, subject.plan.curves.tau, heads)


def _measure(subject: Subject, setting: Setting) -> None:
    """Learn a signal, choose its layout, and evaluate it at the setting's block size and window.

    For comparison, the layout of the base setting and that of rule B are evaluated as well.
    """
    heads = subject.heads(subject.plan.curves.budget)
    # Learn and choose
    table = _learn(subject, setting, heads)
    layout = propose(table, heads, window=setting.window, num_random=0)["densest"]
    layout.write(_layout_file(subject, setting))
    base = _layout_file(subject, _base(subject, setting.signal, setting.seed))
    # Evaluate without training, against full attention
    layouts = {
        "own": layout,
        "base": Layout(Layout.read(base).heads, setting.window),
        "rule": Layout.from_mask(RULES["B"](*subject.grid, heads), window=setting.window),
    }
    size = None if setting.block_size == subject.recipe.data.block_size else setting.block_size
    full = score(subject, None, size)
    change = {name: paired_difference(score(subject, candidate, size), full) for name, candidate in layouts.items()}
    num_shared = int(np.logical_and(layouts["own"].global_mask, layouts["base"].global_mask).sum())
    # Write the result
    result = {
        **asdict(setting),
        "heads": heads,
        "mean_density": table.mean,
        "shared_with_base": num_shared,
        "full_nll": full.mean,
        **{f"{name}_delta_nll_percent": candidate.percent for name, candidate in change.items()},
        **{f"{name}_standard_error": candidate.standard_error for name, candidate in change.items()},
    }
    write_json(curve_file(subject, setting), result)


def _layout_file(subject: Subject, setting: Setting) -> Path:
    """Return the file of the layout chosen with a setting."""
    return curve_file(subject, setting).with_suffix(".yaml")
