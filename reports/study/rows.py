"""Store results of many runs in one file of JSON lines: a line per run, by the name of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import parse_json, read_text, write_atomic

_START = '{"run": "'  # of every line, so that a run is found without parsing the others


@dataclass(frozen=True)
class Row:
    """The result of a run: a line of a file. One process at a time may write to a file.

    Attributes:
        file: the file.
        run: name of the run, without quotes.
    """

    file: Path
    run: str

    def exists(self) -> bool:
        """Return whether the run is finished."""
        return self.run in self._lines()

    def read(self) -> dict[str, Any]:
        """Read the values that ``write`` wrote, with the key "run".

        Raises:
            UserError: the run is not finished, or its line is damaged.
        """
        line = self._lines().get(self.run, "")
        try:
            values: dict[str, Any] = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"results {self.file}, run {self.run}: invalid JSON: {first_line(error)}"
            ) from error
        return values

    def write(self, values: Mapping[str, Any]) -> None:
        """Add the run's line to the file, or replace it: a reader sees the old file or the new one."""
        lines = self._lines() | {self.run: json.dumps({"run": self.run, **values})}
        write_atomic(self.file, "".join(f"{lines[run]}\n" for run in sorted(lines)))

    def _lines(self) -> dict[str, str]:
        """Read the lines of the file by run; empty without a file. Raises ``UserError`` for a line without a run."""
        if not self.file.exists():
            return {}
        lines = read_text(self.file, "results").splitlines()
        for number, line in enumerate(lines, 1):
            if not line.startswith(_START):
                raise UserError(f"results {self.file}, line {number}: expected {_START}")
        return {line.removeprefix(_START).partition('"')[0]: line for line in lines}
