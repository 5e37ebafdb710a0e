"""Export target ``spkv``: the custom model type, which expresses every layout and which only this package loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.model.export.target import ExportTarget, Hybrid, Written

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from spkv_nas.artifacts.layout import Layout


@dataclass(frozen=True)
class SpkvTarget(ExportTarget):
    """Write the layout to the config's ``spkv`` section, under a model type that other loaders refuse.

    ``custom_model_type.py`` says why. This package reads what it wrote, so there is no check.
    """

    name = "spkv"
    help = "a custom model type, which only spkv_nas loads"

    def form(self, config: PreTrainedConfig, layout: Layout) -> str:
        """Return the name, and what local heads have that vLLM may refuse: sinks, and more than three windows."""
        from spkv_nas.engines.vllm import VLLM
        from spkv_nas.model.config_section import has_learned_sinks

        if len(layout.windows) > VLLM.max_windows:
            return f"{self.name} with more than {VLLM.max_windows} windows"
        if layout.sinks and has_learned_sinks(config):
            return f"{self.name} with both kinds of sinks"
        return self.name + {0: "", 1: " with a sink token"}.get(layout.sinks, " with several sink tokens")

    def write(self, hybrid: Hybrid, folder: Path) -> Written:
        """Write the checkpoint with its section."""
        from spkv_nas.model.custom_model_type import CUSTOM_MODEL_TYPE

        form = (
            "loads with spkv_nas.load, or with AutoModelForCausalLM after import spkv_nas; plain transformers "
            f"refuses its model type '{CUSTOM_MODEL_TYPE}'"
        )
        return Written(form, hybrid.save(folder))


SPKV = SpkvTarget()
