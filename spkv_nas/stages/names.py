"""Name a model's results after its folder, its id or its recipe."""

from __future__ import annotations

import os
import re
from pathlib import Path

from spkv_nas.artifacts.checkpoints import run_origin
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.assets import EMBEDDED, EMBEDDED_PREFIX
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json
from spkv_nas.base.workspace import Workspace
from spkv_nas.stages.selection import probe_of

_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")  # folder of an unfinished run


def model_name(source: str) -> str:
    """Return the name of a model's results: its folder's, its config file's folder's, or its id's last part.

    Checkpoints of a run take the run's name, as every run ends in a folder ``final``. A revision is appended.
    """
    if source.startswith(EMBEDDED_PREFIX):
        return EMBEDDED.name
    from spkv_nas.model.source import split_revision

    name, revision = split_revision(source)
    if revision is not None:
        return f"{Path(name).name}-{revision.replace('/', '-')}"
    path = Path(os.path.abspath(source))  # does not follow symbolic links
    path = path.parent if path.suffix == ".json" else path
    if path.name == "final":
        return path.parent.name
    return f"{path.parent.name}-{path.name}" if _CHECKPOINT.fullmatch(path.name) else path.name


def result_name(source: str, workspace: Workspace) -> str:
    """Return the name of ``evaluate``'s results.

    It is that of the probe that a hybrid's layout is from, else of the recipe that trained the model, else the model's.
    """
    if source.startswith(EMBEDDED_PREFIX):
        return model_name(source)
    layout = _saved_layout(Path(source, "config.json"))
    probe, origin = None if layout is None else probe_of(workspace, [layout]), run_origin(Path(source))
    return probe or (model_name(source) if origin is None else origin.recipe)


def _saved_layout(file: Path) -> Layout | None:
    """Read the layout in a hybrid's config without torch; None if there is none, or if it is damaged."""
    try:
        saved = read_json(file, "config")["spkv"]["layout"]
        return Layout(tuple(saved["heads"]), saved["window"], sinks=saved.get("sinks", 0))
    except (UserError, KeyError, TypeError, AttributeError):
        return None
