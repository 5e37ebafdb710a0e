"""Export target ``spkv``: the custom model type, which expresses every layout and which only this package loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from spkv_nas.base.flag import Flag
from spkv_nas.model.export.target import ExportTarget, Hybrid, Written

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from spkv_nas.artifacts.layout import Layout

_ALLOW_DENSE = Flag(
    "Let plain transformers load a layout that it cannot express as a dense model; otherwise loading fails.",
    ("--allow-dense",),
)


@dataclass(frozen=True)
class SpkvTarget(ExportTarget):
    """Write the layout to the config's ``spkv`` section, under a model type that other loaders refuse.

    ``custom_model_type.py`` says why. This package reads what it wrote, so there is no check.

    Attributes:
        allow_dense: keep the original model type, so that plain ``transformers`` runs the model dense.
    """

    name = "spkv"
    help = "a custom model type, which only spkv_nas loads"

    allow_dense: Annotated[bool, _ALLOW_DENSE] = False

    def can_express(self, config: PreTrainedConfig, layout: Layout) -> str | None:
        """Return None: any layout can be expressed."""
        return None

    def write(self, hybrid: Hybrid, folder: Path) -> Written:
        """Write the checkpoint with its section."""
        from spkv_nas.model.custom_model_type import CUSTOM_MODEL_TYPE, set_custom_model_type

        if self.allow_dense:
            set_custom_model_type(hybrid.model.config, False)
            form = "loads with spkv_nas.load; plain transformers silently runs it dense"
        else:
            form = (
                "loads with spkv_nas.load, or with AutoModelForCausalLM after import spkv_nas; plain transformers "
                f"refuses its model type '{CUSTOM_MODEL_TYPE}' (--allow-dense keeps the original one)"
            )
        try:
            weights = hybrid.save(folder)
        finally:
            set_custom_model_type(hybrid.model.config, True)
        return Written(form, weights.done, weights.hashes)


SPKV = SpkvTarget()
