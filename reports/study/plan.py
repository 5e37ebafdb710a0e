"""Parse the plan of the study, ``study.yaml``, strictly: what is measured, on how much text, in how many steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_yaml
from spkv_nas.base.schema import Section, merged, validate
from spkv_nas.search.registry import SAMPLERS
from spkv_nas.training.recipe import Recipe


class Long(Section):
    """A reference with gates that was already trained, without a sparsity penalty."""

    checkpoint: str
    tokens: int = Field(ge=1, description="that its branch was trained on")


class Reference(Section):
    """A dense model of the study; ``recipe`` overrides the recipe in ``file``."""

    file: str | None = Field(None, description="a recipe, from the plan's folder")
    recipe: dict[str, Any] = Field(default_factory=dict)
    unpriced_long: Long | None = None


class Frozen(Section):
    """Training length of gates on a frozen model."""

    steps: int = Field(ge=1)
    step_tokens: int = Field(ge=1)


class Search(Section):
    """A search for the best zero-shot score.

    ``guide`` and ``signals`` are signals that do not depend on the budget; the layouts of the guide are tried first.
    """

    sampler: str
    trials: int = Field(ge=1)
    tokens: int = Field(ge=1, description="of every score, spread over the first held-out part")
    guide: str
    signals: list[str] = Field(default_factory=list)


class Retrain(Section):
    """Retraining of the chosen layouts: references, budget, training settings and seeds."""

    references: list[str]
    budget: str
    branch: dict[str, Any]
    seeds: list[int] = Field(min_length=1)


class Curves(Section):
    """Settings to vary for signals that learn on a frozen model; base values come from the plan, or the library."""

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
        """Check that names refer to existing entries, and that text sizes fit."""
        for name in (*self.retrain.references, self.curves.reference):
            if name not in self.references:
                raise ValueError(f"unknown reference '{name}'")
        for budget in (self.retrain.budget, self.curves.budget):
            if budget not in self.budgets:
                raise ValueError(f"budget {budget} is not one of the plan's budgets")
        if self.search.sampler not in SAMPLERS.names:
            raise ValueError(f"there is no sampler '{self.search.sampler}'; there are {', '.join(SAMPLERS.names)}")
        if max(self.scored_on, self.search.tokens) > self.chosen_on:
            raise ValueError("scored_on and search.tokens are parts of chosen_on")
        return self

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read and check a plan. Raises ``UserError`` if it is invalid."""
        return validate(cls, read_yaml(path, "plan"), f"plan {path}")

    def recipe(self, name: str, base: Path) -> tuple[Recipe, Path]:
        """Return the recipe of a reference, and the folder that its relative paths start from.

        The recipe has the plan's branch settings, and gates without a sparsity penalty.

        Args:
            name: name of the reference.
            base: the plan's folder.

        Raises:
            UserError: the reference does not exist, or its recipe is invalid.
        """
        if name not in self.references:
            raise UserError(f"there is no reference '{name}'; the plan has {', '.join(self.references)}")
        reference = self.references[name]
        file_recipe = {} if reference.file is None else read_yaml(base / reference.file, "recipe")
        path_root = base if reference.file is None else (base / reference.file).parent
        data = merged(merged(file_recipe, self.common), reference.recipe)
        data = {**data, "branch": self.branch, "gates": {"window": self.window, **self.unpriced}}
        return Recipe.parse(data, path_root, f"reference '{name}' of the plan"), path_root
