"""What the frozen lane needs, and where its choice holds: one setting per cell, as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from cells import Cell
from choosers import RULES
from judging import score
from references import Subject
from signals import learn_and_probe

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import write_json
from spkv_nas.evaluation.paired import paired_difference
from spkv_nas.proposal.propose import propose, resolve_tau


@dataclass(frozen=True)
class Setting:
    """How gates learn on the frozen model."""

    steps: int
    step_tokens: int
    block_size: int
    window: int
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"steps-{self.steps}x{self.step_tokens}-block-{self.block_size}-window-{self.window}-seed-{self.seed}"


def curve_file(subject: Subject, setting: Setting) -> Path:
    """Of a setting's result."""
    return subject.folder / "curves" / f"{setting.name}.json"


def settings(subject: Subject) -> list[Setting]:
    """All settings: steps and tokens at the plan's length and window, then these one at a time; of every seed the base
    setting first."""
    asked = subject.plan.curves
    found = []
    for seed in asked.seeds:
        plain = _base(subject, seed)
        found += [plain]
        found += [
            Setting(steps, tokens, plain.block_size, plain.window, seed)
            for tokens in asked.step_tokens
            for steps in asked.steps
        ]
        found += [Setting(plain.steps, plain.step_tokens, size, plain.window, seed) for size in asked.block_sizes]
        found += [Setting(plain.steps, plain.step_tokens, plain.block_size, window, seed) for window in asked.windows]
    return list(dict.fromkeys(found))


def curve_cells(subject: Subject) -> Iterator[Cell]:
    """A cell per setting."""
    for setting in settings(subject):
        title = f"{subject.name}: frozen lane, {setting.name}"
        yield Cell("curve", title, curve_file(subject, setting), partial(_measure, subject, setting))


def _base(subject: Subject, seed: int) -> Setting:
    frozen, block_size = subject.plan.frozen, subject.recipe.data.block_size
    return Setting(frozen.steps, frozen.step_tokens, block_size, subject.plan.window, seed)


def _measure(subject: Subject, setting: Setting) -> None:
    """Learn, choose, and judge at the setting's length and window: its own choice, the base setting's, and a rule's."""
    asked = subject.plan.curves
    heads = subject.heads(asked.budget)
    table, _ = learn_and_probe(
        subject, heads, train=subject.trunk.corpus.train.cut(setting.block_size),
        chosen=subject.parts[0].cut(setting.block_size), window=setting.window, steps=setting.steps,
        step_tokens=setting.step_tokens, seed=setting.seed, name=setting.name,
    )  # fmt: skip
    layout = propose(resolve_tau(table, asked.tau, heads), heads, window=setting.window, num_random=0)["densest"]
    layout.write(_layout_file(subject, setting))
    layouts = {
        "own": layout,
        "base": Layout(Layout.read(_layout_file(subject, _base(subject, setting.seed))).heads, setting.window),
        "rule": Layout.from_mask(RULES["B"](*subject.grid, heads), window=setting.window),
    }
    size = None if setting.block_size == subject.recipe.data.block_size else setting.block_size
    full = score(subject, None, size)
    change = {name: paired_difference(score(subject, one, size), full) for name, one in layouts.items()}
    own, base = layouts["own"].global_mask, layouts["base"].global_mask
    shared = int(np.logical_and(own, base).sum())
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
