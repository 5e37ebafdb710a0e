"""Table of trained checkpoints, ``checkpoints.csv``, stored beside ``comparison.csv``: one row per variant and seed.

Paths are relative to the workspace root and use forward slashes, so the table stays valid when the workspace is moved
or mounted elsewhere. ``hash`` is the layout hash of a hybrid, and empty for full attention and SP-KV.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from spkv_nas.base import errors, files, names
from spkv_nas.base.tables import Column, read_table, write_csv

FILE = "checkpoints.csv"
RUN_RECORD = "run.json"  # in the folder of a finished branch
_COLUMNS = (Column("strategy"), Column("seed", "whole"), Column("hash"), Column("checkpoint"))


@dataclass(frozen=True)
class TrainedModel:
    """One row of the table: a trained checkpoint."""

    strategy: str  # name of the variant in the comparison
    seed: int  # seed of its training
    hash: str  # hash of its layout; "" for full attention and SP-KV
    checkpoint: Path  # its folder


def write_checkpoints(folder: Path, models: Iterable[TrainedModel], root: Path) -> None:
    """Write the table of checkpoints to ``folder``, with paths relative to the workspace ``root``."""
    rows = [asdict(model) | {"checkpoint": model.checkpoint.relative_to(root).as_posix()} for model in models]
    write_csv(folder / FILE, pd.DataFrame(rows, columns=[column.name for column in _COLUMNS]))


def read_checkpoints(folder: Path, root: Path) -> list[TrainedModel]:
    """Read the table of checkpoints in ``folder``, whose paths are relative to, and in, the workspace ``root``."""
    rows = read_table(folder / FILE, "table of checkpoints", _COLUMNS)
    # Refuse paths that lead out of the workspace
    for line, path in rows["checkpoint"].items():
        if not path or Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
            raise errors.UserError(
                f"table of checkpoints {folder / FILE}, line {line}: '{path[:100]}' is not in the workspace"
            )
    return [
        TrainedModel(strategy, int(seed), short_hash, root / checkpoint)
        for strategy, seed, short_hash, checkpoint in rows.itertuples(index=False, name=None)
    ]


class RunOrigin(NamedTuple):
    """Recipe and variant (a baseline, or a layout's strategy; "" for a dense model) that produced a checkpoint."""

    recipe: str
    variant: str


def run_origin(checkpoint: Path) -> RunOrigin | None:
    """Return the recipe and variant of a checkpoint of ``runs/``; None if no recipe's run produced it."""
    if files.is_file(file := checkpoint / RUN_RECORD):
        record = files.read_json(file, "run record")
        content = record.get("recipe")
        if isinstance(content, dict) and isinstance(name := content.get("name"), str):
            return RunOrigin(names.check_name(name, f"{file}: the recipe's name"), str(record.get("variant", "")))
    *_, runs, recipe, _, final = ("", "", "", "", *checkpoint.absolute().parts)
    return RunOrigin(recipe, "") if (runs, final) == ("runs", "final") else None
