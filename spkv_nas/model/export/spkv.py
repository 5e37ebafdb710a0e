"""Export target ``spkv``: the custom model type, which expresses every layout.

The folder carries ``modeling_spkv.py``, by which plain transformers loads it with ``trust_remote_code=True``. This
package, and in it vLLM's plug-in, load the folder with classes of their own.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.base import errors, files
from spkv_nas.model.export.target import ExportTarget, Hybrid, TargetError, Written

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from spkv_nas.artifacts.layout import Layout

_CODE = Path(__file__).with_name("modeling_spkv.py")


@dataclass(frozen=True)
class SpkvTarget(ExportTarget):
    """Write the layout to the config's ``spkv`` section, under a model type that other loaders refuse.

    ``custom_model_type.py`` says why. This package reads what it wrote, so only the code for plain transformers is
    checked; it is left out, not the export given up, if it computes something else.
    """

    name = "spkv"
    help = "a custom model type, which spkv_nas loads, and plain transformers with trust_remote_code"

    def form(self, config: "PreTrainedConfig", layout: "Layout") -> str:
        """Return the name, and what local heads have that vLLM may refuse: sinks, and more than three windows."""
        from spkv_nas.engines.vllm import VLLM
        from spkv_nas.model.config_section import has_learned_sinks

        if len(layout.windows) > VLLM.max_windows:
            return f"{self.name} with more than {VLLM.max_windows} windows"
        if layout.sinks and has_learned_sinks(config):
            return f"{self.name} with both kinds of sinks"
        return self.name + {0: "", 1: " with a sink token"}.get(layout.sinks, " with several sink tokens")

    def write(self, hybrid: Hybrid, folder: Path) -> Written:
        """Write the checkpoint with its section, and the code for plain transformers if it computes the hybrid."""
        weights = hybrid.save(folder)
        form = "loads with spkv_nas.load, or with AutoModelForCausalLM after import spkv_nas"
        code = _add_code(hybrid, folder)
        refused_by = () if (folder / _CODE.name).is_file() else ("transformers",)
        return Written(f"{form}; {code}", weights, refused_by)


def _add_code(hybrid: Hybrid, folder: Path) -> str:
    """Add the code for plain transformers to a folder; return how well it agrees, or why it was left out."""
    from spkv_nas.model import custom_model_type
    from spkv_nas.model.export import verify_export

    # Name the classes and copy their file
    config, code = folder / "config.json", folder / _CODE.name
    before = config.read_bytes()
    classes = {
        "AutoConfig": custom_model_type.native_class(hybrid.model.config),
        "AutoModelForCausalLM": type(hybrid.model),
    }
    auto_map = {auto: f"{code.stem}.SPKV{kind.__name__}" for auto, kind in classes.items()}
    files.write_atomic(
        config, json.dumps({**json.loads(before), "auto_map": auto_map}, indent=2, sort_keys=True) + "\n"
    )
    shutil.copyfile(_CODE, code)
    # Compare it with the hybrid, and remove it if it differs
    try:
        if hybrid.model.config.get_text_config() is not hybrid.model.config:
            raise TargetError("it is for models of text alone")
        agreement = verify_export.agreement(hybrid, folder)
        return f"plain transformers loads it with trust_remote_code=True: {agreement}"
    except (TargetError, errors.UserError) as error:
        code.unlink()
        files.write_atomic(config, before)
        reason = str(error) if isinstance(error, TargetError) else "they could not be compared on this machine"
        return f"plain transformers refuses it, because its code was left out: {reason}"
