"""Name a model's results, and describe models by their sizes and context."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import run_origin
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base import assets, files
from spkv_nas.base.errors import UserError
from spkv_nas.base.workspace import Workspace
from spkv_nas.cost.ladder import find_level
from spkv_nas.evaluation.selected import probe_of
from spkv_nas.model.source import split_revision
from spkv_nas.stages.options import REFERENCE

_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")  # folder of an unfinished run


def model_name(source: str) -> str:
    """Return the name of a model's results: its folder's, its config file's folder's, or its id's last part.

    Checkpoints of a run take the run's name, as every run ends in a folder ``final``. A revision is appended.
    """
    if source.startswith(assets.EMBEDDED_PREFIX):
        return assets.EMBEDDED.name
    name, revision = split_revision(source)
    if revision is not None:
        return f"{Path(name).name}-{revision.replace('/', '-')}"
    path = Path(os.path.abspath(source))  # does not follow symbolic links
    if path.suffix == ".json":
        path = path.parent
    if path.name == "final":
        return path.parent.name
    if _CHECKPOINT.fullmatch(path.name):
        return f"{path.parent.name}-{path.name}"
    return path.name


def result_name(source: str, workspace: Workspace) -> str:
    """Return the name of ``evaluate``'s results: that of a layout's probe, else the recipe's, else the model's."""
    if source.startswith(assets.EMBEDDED_PREFIX):
        return model_name(source)
    layout = _saved_layout(Path(source, "config.json"))
    probe = None if layout is None else probe_of(workspace, [layout])
    origin = run_origin(Path(source))
    return probe or (model_name(source) if origin is None else origin.recipe)


def _saved_layout(file: Path) -> Layout | None:
    """Read the layout in a hybrid's config without torch; None if there is none, or if it is damaged."""
    try:
        saved = files.read_json(file, "config")["spkv"]["layout"]
        return Layout(
            tuple(saved["heads"]),
            saved.get("window", 0),
            sinks=saved.get("sinks", 0),
            windows=saved.get("windows", {}),
        )
    except (UserError, KeyError, TypeError, AttributeError):
        return None


@dataclass(frozen=True)
class SizedModel:
    """Level of the ladder or model, described by its sizes; fields that a level lacks are those of ``ModelSize``."""

    name: str  # name of its results
    title: str  # name to show to users
    shape: Shape  # shape of the model
    positions: int | None = None
    num_sliding: int = 0
    native_windows: tuple[int | None, ...] = ()
    is_mixture: bool = False

    @classmethod
    def of(cls, level: str | None, model: str | None) -> "SizedModel":
        """Look up a level of the ladder, or a model, by default the embedded reference; ``UserError`` if unknown."""
        if level is not None:
            return cls(level, level, find_level(level).shape)
        from spkv_nas.model.checkpoint import read_size

        source = model or REFERENCE
        size = read_size(source)
        return cls(
            name=model_name(source),
            title=source,
            shape=size.shape,
            positions=size.positions,
            num_sliding=size.num_sliding,
            native_windows=size.native_windows,
            is_mixture=size.is_mixture,
        )
