"""Schema and parser of an ablations file, a list of overrides of one recipe. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV, check_layout_names
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import files, names, schema
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant


class Row(BaseModel):
    """Row of an ablations file: an SP-KV branch by default, with recipe sections as further keys."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    variant: Literal["sp-kv", "full-attention"] = Field(
        "sp-kv", description="sp-kv or full-attention"
    )
    layout: str | None = Field(
        None, description="a layout file, from the folder of the ablations: a hybrid"
    )
    trained: bool = Field(
        True,
        description="false: the dense checkpoint as it is, with the row's layout if it has one",
    )

    @model_validator(mode="after")
    def _has_trained_gates(self) -> "Row":
        if not self.trained and self.layout is None and self.variant == SP_KV:
            raise ValueError(
                "gates are trained: trained: false needs variant: full-attention, or a layout"
            )
        return self

    def read_variant(self, folder: Path) -> Variant:
        """Return the variant to train for this row; the path of a layout file starts from ``folder``."""
        if self.layout is not None:
            layout = Layout.read(folder / self.layout)
            check_layout_names([layout.strategy])
            return Variant.hybrid(layout)
        return Variant.full_attention() if self.variant == FULL_ATTENTION else Variant.sp_kv()


class Ablations(BaseModel):
    """Content of an ablations file, the input of ``spkv-nas reproduce ablate``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=names.MAX_CHARACTERS)
    recipe: dict[str, Any] | str = Field(
        description="the base recipe, or its file from the folder of the ablations"
    )
    rows: dict[str, Row] = Field(min_length=1, description="by name; the first is the baseline")


@dataclass(frozen=True)
class AblationPlan:
    """Validated ablations: recipes (paths start from ``base``) and variants by row; ``untrained`` rows stay dense."""

    name: str
    base: Path
    recipes: dict[str, Recipe]
    variants: dict[str, Variant]
    untrained: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path, dtype: str | None = None) -> "AblationPlan":
        """Read an ablations file; ``dtype`` overrides precisions. Raises ``UserError``, which names row and key."""
        # Base recipe, inline or from a file
        file = schema.validate(Ablations, files.read_yaml(path, "ablations"), f"ablations {path}")
        base = path.parent
        if isinstance(file.recipe, str):
            base = (base / file.recipe).parent
            common = files.read_yaml(path.parent / file.recipe, "recipe")
        else:
            common = file.recipe
        # Recipe of each row
        recipes = {
            name: Recipe.parse(
                schema.merged(common, row.model_extra or {}),
                base,
                f"ablations {path}, row '{name}'",
            ).with_precision(dtype)
            for name, row in file.rows.items()
        }
        variants = {name: row.read_variant(path.parent) for name, row in file.rows.items()}
        untrained = frozenset(name for name, row in file.rows.items() if not row.trained)
        return cls(file.name, base, recipes, variants, untrained)
