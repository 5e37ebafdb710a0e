"""Parse the plan of the study, ``study.yaml``, strictly: what is measured, on how much text, in how many steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from spkv_nas.base.files import read_yaml
from spkv_nas.base.schema import Section, merged, validate
from spkv_nas.training.recipe import Recipe

HEAD_GATES, DUO, PRICED, ADD_ONE_HEAD = SIGNALS = ("head-gates", "duo", "priced", "add-one-head")
LAYERS, RANDOM = "interleaved-last", "random-"
LEARNED = "learned"


class Reference(Section):
    """A dense model of the study: a finished one, or one trained by the plan's two phases."""

    model: str | None = Field(
        None, description="finished model; a relative path starts from the plan's folder"
    )
    stable: dict[str, Any] | None = Field(
        None, description="overrides the plan's stable phase, and has the model trained"
    )
    decay: dict[str, Any] = Field(default_factory=dict, description="overrides the plan's decay")
    data: dict[str, Any] = Field(
        description="text to choose, heal and judge on; overrides the plan's data"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Reference:
        if (self.model is None) == (self.stable is None):
            raise ValueError("a reference has either 'model' or 'stable'")
        return self


class Steps(Section):
    """Training steps of the signals that learn."""

    head_gates: int = Field(ge=1, alias=HEAD_GATES)
    duo: int = Field(ge=1)
    priced: int = Field(ge=1)


class Sinks(Section):
    """Sink tokens that local heads see: while heads are chosen, and in the layout that is judged."""

    chosen: int = Field(ge=0)
    run: int | Literal["learned"]


class Judged(Section):
    """Layouts to judge: every chooser at every budget with every pair of sinks; 0 steps judge without retraining."""

    references: list[str] | None = Field(None, description="references to judge on; default: all")
    steps: int = Field(ge=0)
    budgets: list[str] = Field(min_length=1)
    choosers: list[str] = Field(min_length=1)
    sinks: list[Sinks] = Field(min_length=1)

    @model_validator(mode="after")
    def _known_choosers(self) -> Judged:
        for name in self.choosers:
            if name not in (*SIGNALS, LAYERS) and not name.removeprefix(RANDOM).isdecimal():
                raise ValueError(
                    f"unknown chooser '{name}'; there are {', '.join((*SIGNALS, LAYERS))} and {RANDOM}N"
                )
        return self


class Plan(Section):
    """The whole plan; ``study.yaml`` explains the keys."""

    window: int = Field(ge=1)
    tau: float = Field(gt=0.0, lt=1.0)
    data: dict[str, Any]
    chosen_on: int = Field(ge=1)
    scored_on: int = Field(ge=1)
    judged_on: int = Field(ge=1)
    precision: str
    stable: dict[str, Any]
    decay: dict[str, Any]
    references: dict[str, Reference] = Field(min_length=1)
    steps: Steps
    heal: dict[str, Any]
    judged: list[Judged] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if self.scored_on > self.chosen_on:
            raise ValueError("scored_on is a part of chosen_on")
        unknown = {name for part in self.judged for name in part.references or ()} - set(
            self.references
        )
        if unknown:
            raise ValueError(f"judged names unknown references: {', '.join(sorted(unknown))}")
        return self

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read and check a plan. Raises ``UserError`` if it is invalid."""
        return validate(cls, read_yaml(path, "plan"), f"plan {path}")

    def training(self, name: str, base: Path, stable: Path | None = None) -> Recipe:
        """Return the recipe of a phase that trains a reference: the stable one, or the decay of its checkpoint.

        Args:
            name: name of the reference.
            base: the plan's folder.
            stable: checkpoint of the stable phase, whose decay is to be returned.

        Raises:
            UserError: the recipe is invalid.
        """
        reference = self.references[name]
        begin = merged(self.stable, reference.stable or {})
        if stable is None:
            return self._recipe(begin, begin.get("data", {}), name, base)
        end = {
            "seed": begin.get("seed", 0),
            **merged(self.decay, reference.decay),
            "model": {"path": str(stable)},
        }
        return self._recipe(end, end.get("data", {}), name, base)

    def recipe(self, name: str, base: Path, dense: str, steps: int = 1) -> Recipe:
        """Return the recipe by which branches of a reference's dense model are retrained.

        Args:
            name: name of the reference.
            base: the plan's folder.
            dense: the dense model.
            steps: steps of the retraining, of which a tenth is warm-up.

        Raises:
            UserError: the recipe is invalid.
        """
        branch = {"steps": steps, "warmup_steps": steps // 10, **self.heal}
        sections = {
            "model": {"path": dense},
            "branch": branch,
            "precision": self.precision,
            "checkpoint_every": 1000,
        }
        return self._recipe(sections, self.references[name].data, name, base)

    def _recipe(
        self, sections: dict[str, Any], data: dict[str, Any], name: str, base: Path
    ) -> Recipe:
        """Return a recipe with the plan's data and window."""
        filled = {
            **sections,
            "name": "study",
            "data": merged(self.data, data),
            "gates": {"window": self.window},
        }
        return Recipe.parse(filled, base, f"reference '{name}' of the plan")
