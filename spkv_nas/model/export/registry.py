"""List the export targets: the built-in ones, in the order in which ``export`` tries them, and those of packages.

``spkv``, the custom model type, expresses every layout. Its folder carries ``modeling_spkv.py``, by which plain
transformers loads it with ``trust_remote_code=True``. This package, and in it vLLM's plug-in, load the folder with
classes of their own.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spkv_nas.base import errors, files, registry
from spkv_nas.model.export import native
from spkv_nas.model.export.target import ExportTarget, Hybrid, TargetError, Written

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from spkv_nas.artifacts.layout import Layout

AUTO = "auto"  # choose the first target that can express the layout
_CODE = Path(__file__).with_name("modeling_spkv.py")


@dataclass(frozen=True)
class SpkvTarget(ExportTarget):
    """Write the layout to the config's ``spkv`` section, under a model type that other loaders refuse.

    ``custom_model_type.py`` says why. This package reads what it wrote, so only the code for plain transformers is
    checked; it is left out, not the export given up, if it computes something else.
    """

    name = "spkv"
    help = (
        "a custom model type, which spkv_nas loads, and plain transformers with trust_remote_code"
    )

    def form(self, config: "PreTrainedConfig", layout: "Layout") -> str:
        """Return the name, and what local heads have that vLLM may refuse: sinks, and more than three windows."""
        from spkv_nas.engines.vllm import VLLM
        from spkv_nas.model.config_section import has_learned_sinks

        if len(layout.windows) > VLLM.max_windows:
            return f"{self.name} with more than {VLLM.max_windows} windows"
        if layout.sinks and has_learned_sinks(config):
            return f"{self.name} with both kinds of sinks"
        if layout.sinks == 1:
            return f"{self.name} with a sink token"
        if layout.sinks:
            return f"{self.name} with several sink tokens"
        return self.name

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
    config = folder / "config.json"
    code = folder / _CODE.name
    before = config.read_bytes()
    config_class = custom_model_type.native_class(hybrid.model.config)
    content = json.loads(before)
    content["auto_map"] = {
        "AutoConfig": f"{code.stem}.SPKV{config_class.__name__}",
        "AutoModelForCausalLM": f"{code.stem}.SPKV{type(hybrid.model).__name__}",
    }
    files.write_atomic(config, json.dumps(content, indent=2, sort_keys=True) + "\n")
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
        reason = "they could not be compared on this machine"
        if isinstance(error, TargetError):
            reason = str(error)
        return f"plain transformers refuses it, because its code was left out: {reason}"


TARGETS: registry.Registry[ExportTarget] = registry.Registry(
    "spkv_nas.export_targets",
    "export target",
    ExportTarget,  # type: ignore[type-abstract]
    (native.NativeTarget(), native.GraniteSwaTarget(), SpkvTarget(), native.MlxTarget()),
)


def chosen_targets(
    to: str | ExportTarget, options: Mapping[str, Any], engine: str | None = None
) -> list[ExportTarget]:
    """Return the targets that ``to`` names, in the order in which to try them, with their options.

    "auto" names all built-in targets but those that are for another engine than ``engine``. Raises ``UserError``: there
    is no such target, or none of them has one of the options.
    """
    # Look the targets up
    if isinstance(to, ExportTarget):
        chosen: Iterable[ExportTarget] = [to]
    elif to == AUTO:
        chosen = [target for target in TARGETS.built_in if target.engine in (None, engine)]
    elif to in TARGETS.names:
        chosen = [TARGETS[to]]
    else:
        raise errors.UserError(
            f"unknown export target '{to}'; expected one of {', '.join((AUTO, *TARGETS.names))}"
        )
    return _with_options(list(chosen), options)


def _with_options(
    targets: Sequence[ExportTarget], options: Mapping[str, Any]
) -> list[ExportTarget]:
    """Return targets with those of the options that each has. Raises ``UserError`` for one that none of them has."""
    names = [{field.name for field in fields(target)} for target in targets]  # type: ignore[arg-type]
    for option in options:
        if not any(option in target_names for target_names in names):
            listed = " or ".join(target.name for target in targets)
            raise errors.UserError(f"an export to {listed} has no option '{option}'\nleave it out")
    chosen = []
    for target, target_names in zip(targets, names, strict=True):
        known = {name: value for name, value in options.items() if name in target_names}
        chosen.append(target.with_options(known))
    return chosen
