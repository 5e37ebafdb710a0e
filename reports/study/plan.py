"""The plan of the study, ``study.yaml``, parsed strictly: what is measured, on how much text, in how many steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from spkv_nas.artifacts.samplers import SAMPLERS
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_yaml
from spkv_nas.base.schema import Section, merged, validate
from spkv_nas.training.recipe import Recipe


class Long(Section):
    """A reference with gates that was trained before, without a price."""

    checkpoint: str
    tokens: int = Field(ge=1, description="that its branch was trained on")


class Reference(Section):
    """A dense model, and what is known of it beside; ``recipe`` goes over what ``file`` says."""

    file: str | None = Field(None, description="a recipe, from the plan's folder")
    recipe: dict[str, Any] = Field(default_factory=dict)
    unpriced_long: Long | None = None


class Frozen(Section):
    """How long gates learn on a frozen model."""

    steps: int = Field(ge=1)
    step_tokens: int = Field(ge=1)


class Search(Section):
    """A search for the best zero-shot score.

    ``guide`` and ``signals`` are signals that do not depend on the budget; the guide's own layouts are tried first.
    """

    sampler: str
    trials: int = Field(ge=1)
    tokens: int = Field(ge=1, description="of every score, spread over the first held-out part")
    guide: str
    signals: list[str] = Field(default_factory=list)


class Retrain(Section):
    """What is retrained, and how."""

    references: list[str]
    budget: str
    branch: dict[str, Any]
    seeds: list[int] = Field(min_length=1)


class Curves(Section):
    """Settings of signals that learn on a frozen model; base values are those of the plan, or the library's."""

    reference: str
    signals: list[str]
    budget: str
    tau: str
    steps: list[int]
    step_tokens: list[int]
    seeds: list[int]
    block_sizes: list[int]
    windows: list[int]


class Plan(Section):
    """The whole plan; ``study.yaml`` explains the keys."""

    window: int = Field(ge=1)
    budgets: list[str] = Field(min_length=1)
    taus: list[str] = Field(min_length=1)
    compared: list[str] = Field(min_length=2, description="of a trained and of a frozen model, and others")
    chosen_on: int = Field(ge=1)
    scored_on: int = Field(ge=1)
    common: dict[str, Any]
    references: dict[str, Reference] = Field(min_length=1)
    branch: dict[str, Any]
    priced: dict[str, Any]
    unpriced: dict[str, Any]
    frozen: Frozen
    head_gates_steps: int = Field(ge=1)
    duo_steps: int = Field(ge=1)
    regression_layouts: int = Field(ge=1)
    random: int = Field(ge=0)
    search: Search
    retrain: Retrain
    curves: Curves

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        for name in (*self.retrain.references, self.curves.reference):
            if name not in self.references:
                raise ValueError(f"there is no reference '{name}'")
        for budget in (self.retrain.budget, self.curves.budget):
            if budget not in self.budgets:
                raise ValueError(f"budget {budget} is not one of the plan's budgets")
        if self.search.sampler not in SAMPLERS:
            raise ValueError(f"there is no sampler '{self.search.sampler}'; there are {', '.join(SAMPLERS)}")
        if max(self.scored_on, self.search.tokens) > self.chosen_on:
            raise ValueError("scored_on and search.tokens are parts of chosen_on")
        return self

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read and check a plan. Raises ``UserError``."""
        return validate(cls, read_yaml(path, "plan"), f"plan {path}")

    def recipe(self, name: str, base: Path) -> tuple[Recipe, Path]:
        """The recipe of a reference, with the plan's branch and gates without a price, and where its paths start.

        Args:
            base: the plan's folder, from which relative paths start.

        Raises:
            UserError: there is no such reference, or its recipe is wrong.
        """
        if name not in self.references:
            raise UserError(f"there is no reference '{name}'; the plan has {', '.join(self.references)}")
        reference = self.references[name]
        said = {} if reference.file is None else read_yaml(base / reference.file, "recipe")
        start = base if reference.file is None else (base / reference.file).parent
        data = merged(merged(said, self.common), reference.recipe)
        data = {**data, "branch": self.branch, "gates": {"window": self.window, **self.unpriced}}
        return Recipe.parse(data, start, f"reference '{name}' of the plan"), start
