"""Read one layout file for the ``layout`` commands."""

from __future__ import annotations

from pathlib import Path

from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.base.errors import UserError
from spkv_nas.stages.commands import command_line, next_line
from spkv_nas.stages.layout.convert.command import ConvertOptions


def _free(file: Path) -> Path:
    """Return the path, or if it exists one with ``-layout`` appended to its stem."""
    return file if not file.exists() else file.with_name(f"{file.stem}-layout{file.suffix}")


def read_layout(file: Path) -> Proposal:
    """Read one layout file. Raises ``UserError``, for a file of scores with the command that converts it."""
    if file.suffix in (".tsv", ".csv") or file.is_dir():
        stem = file.name if file.is_dir() else file.stem  # folder names may contain dots
        command = command_line(ConvertOptions(source=file, target=_free(file.with_name(f"{stem}.yaml")), budget="25%"))
        raise UserError(f"{file} is not a layout file; convert it first\n{next_line(command)}")
    return Proposal.read([file])
