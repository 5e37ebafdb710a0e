"""List the export targets: the built-in ones, in the order in which ``export`` tries them, and those of packages."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from spkv_nas.base import errors, registry
from spkv_nas.model.export import native, spkv
from spkv_nas.model.export.target import ExportTarget

AUTO = "auto"  # choose the first target that can express the layout

TARGETS: registry.Registry[ExportTarget] = registry.Registry(
    "spkv_nas.export_targets",
    "export target",
    ExportTarget,  # type: ignore[type-abstract]
    (native.NativeTarget(), native.GraniteSwaTarget(), spkv.SpkvTarget(), native.MlxTarget()),
)


def chosen_targets(to: str | ExportTarget, options: Mapping[str, Any], engine: str | None = None) -> list[ExportTarget]:
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
        raise errors.UserError(f"unknown export target '{to}'; expected one of {', '.join((AUTO, *TARGETS.names))}")
    # Check that a target has each option
    targets = [(target, {field.name for field in fields(target)}) for target in chosen]  # type: ignore[arg-type]
    for name in options:
        if not any(name in names for _, names in targets):
            listed = " or ".join(target.name for target, _ in targets)
            raise errors.UserError(f"an export to {listed} has no option '{name}'\nleave it out")
    return [
        target.with_options({name: value for name, value in options.items() if name in names})
        for target, names in targets
    ]
