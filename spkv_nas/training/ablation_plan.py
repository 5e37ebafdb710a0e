"""Read a file of ablations: a list of overrides on one recipe, each row checked. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV, check_layout_names
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import read_yaml
from spkv_nas.base.names import MOST_CHARACTERS
from spkv_nas.base.schema import merged, validate
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant


class Row(BaseModel):
    """One row: an SP-KV branch unless it says otherwise; all other keys are sections of a recipe."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    variant: str = Field(SP_KV, description="sp-kv or full-attention")
    layout: str | None = Field(None, description="a layout file, from the folder of the ablations: a hybrid")

    @field_validator("variant")
    @classmethod
    def _is_known(cls, variant: str) -> str:
        if variant not in (SP_KV, FULL_ATTENTION):
            raise ValueError(f"should be '{SP_KV}' or '{FULL_ATTENTION}'")
        return variant

    def read_variant(self, folder: Path) -> Variant:
        """The variant that the row asks for; a layout's file is looked up from ``folder``. Raises ``UserError``."""
        if self.layout is not None:
            layout = Layout.read(folder / self.layout)
            check_layout_names([layout.strategy])
            return Variant.hybrid(layout)
        return Variant.full_attention() if self.variant == FULL_ATTENTION else Variant.sp_kv()


class Ablations(BaseModel):
    """The file of ``spkv-nas ablate``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MOST_CHARACTERS)
    recipe: dict[str, Any] | str = Field(description="the base recipe, or its file from the folder of the ablations")
    rows: dict[str, Row] = Field(min_length=1, description="by name; the first is the baseline")


@dataclass(frozen=True)
class AblationPlan:
    """A checked file of ablations: its name, the folder that relative paths start from, and by row what is trained."""

    name: str
    base: Path
    recipes: dict[str, Recipe]
    variants: dict[str, Variant]

    @classmethod
    def read(cls, path: Path, dtype: str | None = None) -> AblationPlan:
        """Read a file; ``dtype`` is a precision in place of the rows' own.

        Raises:
            UserError: naming the row and the key that is wrong.
        """
        file = validate(Ablations, read_yaml(path, "ablations"), f"ablations {path}")
        base = path.parent
        if isinstance(file.recipe, str):
            base = (base / file.recipe).parent
            common = read_yaml(path.parent / file.recipe, "recipe")
        else:
            common = file.recipe
        recipes = {
            name: Recipe.parse(
                merged(common, row.model_extra or {}), base, f"ablations {path}, row '{name}'"
            ).with_precision(dtype)
            for name, row in file.rows.items()
        }
        return cls(file.name, base, recipes, {name: row.read_variant(path.parent) for name, row in file.rows.items()})
