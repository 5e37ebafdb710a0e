"""Name a model's results after its folder, its id or its recipe."""

from __future__ import annotations

import os
import re
from pathlib import Path

from spkv_nas.artifacts.checkpoints import run_origin
from spkv_nas.base.assets import EMBEDDED, EMBEDDED_PREFIX

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


def result_name(source: str) -> str:
    """Return the name of ``evaluate``'s results: the recipe that trained the model, else ``model_name``."""
    origin = None if source.startswith(EMBEDDED_PREFIX) else run_origin(Path(source))
    return model_name(source) if origin is None else origin.recipe
