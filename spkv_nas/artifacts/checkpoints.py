"""``checkpoints.csv``: where the models of a comparison are, beside ``comparison.csv``; one row per variant and seed.

A path starts from the workspace's root and has forward slashes, so that the table holds where the workspace is moved
or mounted elsewhere. ``hash`` is that of a hybrid's layout, and empty for full attention and SP-KV.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import is_file, read_json
from spkv_nas.base.names import check_name
from spkv_nas.base.tables import Column, read_table, write_csv

FILE = "checkpoints.csv"
RUN_RECORD = "run.json"  # in the folder of a finished branch
_COLUMNS = (
    Column("strategy"),
    Column("seed", "whole"),
    Column("hash"),
    Column("checkpoint"),
)


@dataclass(frozen=True)
class TrainedModel:
    """One row: a variant by its name in the comparison, its seed, its layout's hash or "", and its folder."""

    strategy: str
    seed: int
    hash: str
    checkpoint: Path


def write_checkpoints(folder: Path, models: Iterable[TrainedModel], root: Path) -> None:
    """Write the table to ``folder``; ``root`` is the workspace's, in which all checkpoints are."""
    rows = [asdict(model) | {"checkpoint": model.checkpoint.relative_to(root).as_posix()} for model in models]
    write_csv(folder / FILE, pd.DataFrame(rows, columns=[column.name for column in _COLUMNS]))


def read_checkpoints(folder: Path, root: Path) -> list[TrainedModel]:
    """What ``write_checkpoints`` wrote, with the paths from ``root``.

    Raises:
        UserError: naming file and line; also for a path that leads out of ``root``.
    """
    rows = read_table(folder / FILE, "table of checkpoints", _COLUMNS)
    for line, path in rows["checkpoint"].items():
        if not path or Path(path).is_absolute() or ".." in Path(path).parts or "\0" in path:
            raise UserError(
                f"table of checkpoints {folder / FILE}, line {line}: '{path[:100]}' is not in the workspace"
            )
    return [
        TrainedModel(strategy, int(seed), short_hash, root / checkpoint)
        for strategy, seed, short_hash, checkpoint in rows.itertuples(index=False, name=None)
    ]


@dataclass(frozen=True)
class RunOrigin:
    """Where a trained checkpoint comes from.

    Attributes:
        recipe: name of the recipe, which is that of its results.
        variant: what the run trained: a baseline or the strategy of a layout; "" for a dense model.
    """

    recipe: str
    variant: str


def run_origin(checkpoint: Path) -> RunOrigin | None:
    """Tell which recipe's run left a checkpoint; None of any other.

    A branch has a record; a dense model lies in ``runs/<recipe>/<run>/final``.

    Raises:
        UserError: the record is damaged.
    """
    if is_file(file := checkpoint / RUN_RECORD):
        record = read_json(file, "run record")
        content = record.get("recipe")
        if isinstance(content, dict) and isinstance(name := content.get("name"), str):
            return RunOrigin(check_name(name, f"{file}: the recipe's name"), str(record.get("variant", "")))
    *_, runs, recipe, _, final = ("", "", "", "", *checkpoint.absolute().parts)
    return RunOrigin(recipe, "") if (runs, final) == ("runs", "final") else None
