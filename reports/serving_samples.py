"""Keep the samples of ``serving_speed.py`` in a file, and report them.

Neither torch nor this package is imported at the top: the processes that vLLM runs in import this module as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

# (prefill, decode) in tokens per second by configuration and cell
Rates = dict[str, dict[str, list[list[float]]]]


@dataclass(frozen=True)
class Sample:
    """Rates of one batch.

    Attributes:
        turn: number of the process that took it.
        configuration: name of the configuration.
        cell: context and batch, "2048 x 8".
        rates: tokens per second of prefill and of decoding; None if the batch did not run at once, or not in time.
    """

    turn: int
    configuration: str
    cell: str
    rates: list[float] | None


class Samples:
    """Samples so far, kept in the file ``--samples``: a header with options and hardware, then one line per sample."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Read the samples of an earlier run. Exits if they were taken with other options or on other hardware."""
        self.file: Path | None = options.samples
        self.samples: list[Sample] = []
        if self.file is None:
            return
        measured_on = {key: value for key, value in hardware(options).items() if key != "commit"}
        header = json.dumps({"hardware": measured_on, "options": settings(options)})
        if not self.file.exists():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(f"{header}\n")
        first, *lines = self.file.read_text().splitlines()
        if first != header:
            raise SystemExit(
                f"{self.file} has samples of other options or hardware: give another --samples"
            )
        self.samples = [Sample(**json.loads(line)) for line in lines]

    def add(self, sample: Sample) -> None:
        """Add a sample, and print it."""
        self.samples.append(sample)
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(f"{json.dumps(vars(sample))}\n")
        rates = (
            "-"
            if sample.rates is None
            else "prefill {:,.1f}, decode {:,.1f} tok/s".format(*sample.rates)
        )
        print(f"{sample.configuration}, {sample.cell}: {rates}", file=sys.stderr, flush=True)

    def count(self, turn: int, cell: str) -> int:
        """Return the number of samples of a cell that a process has taken."""
        return sum((sample.turn, sample.cell) == (turn, cell) for sample in self.samples)

    def by_configuration(self, names: Sequence[str]) -> Rates:
        """Return the rates by configuration, in the order of their names, and by cell."""
        answer: Rates = {name: {} for name in names}
        for sample in self.samples:
            rates = answer[sample.configuration].setdefault(sample.cell, [])
            rates += [] if sample.rates is None else [sample.rates]
        return answer


def hardware(options: argparse.Namespace) -> dict[str, str]:
    """Return the device and the versions."""
    from spkv_kernels.timing import device_name

    from spkv_nas.base.version import environment

    return {"device": device_name(options.device), **environment()}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that decide what is measured."""
    return {key: value for key, value in vars(options).items() if key not in ("python", "samples")}


def rows(by_configuration: Rates) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell and configuration: medians, ranges, and ratios to the first configuration."""
    base = next(iter(by_configuration.values()))
    cells = dict.fromkeys(cell for by_cell in by_configuration.values() for cell in by_cell)
    for cell, configuration in product(cells, by_configuration):
        row: dict[str, Any] = {"cell": cell, "configuration": configuration}
        for column, kind in enumerate(("prefill", "decode")):
            rates = [rate[column] for rate in by_configuration[configuration].get(cell, [])]
            dense = [rate[column] for rate in base.get(cell, [])]
            row[kind] = statistics.median(rates) if rates else None
            row[f"{kind}_range"] = [min(rates), max(rates)] if rates else None
            row[f"{kind}_ratio"] = (
                statistics.median(rates) / statistics.median(dense) if rates and dense else None
            )
        yield row


def report(by_configuration: Rates, options: argparse.Namespace) -> None:
    """Print a table, and everything as a line of JSON."""
    table = list(rows(by_configuration))
    titles = ("decode tok/s", "ratio", "prefill tok/s", "ratio")
    print(
        f"{'context x batch':16} {'configuration':26} {titles[0]:>13} {titles[1]:>6} {titles[2]:>14} {titles[3]:>6}"
    )
    for row in table:
        numbers = [
            f"{'-':>{width}}" if row[key] is None else f"{row[key]:{width},.{digits}f}"
            for key, width, digits in (
                ("decode", 13, 1),
                ("decode_ratio", 6, 2),
                ("prefill", 14, 1),
                ("prefill_ratio", 6, 2),
            )
        ]
        print(f"{row['cell']:16} {row['configuration']:26} {' '.join(numbers)}")
    print(json.dumps({"hardware": hardware(options), "options": settings(options), "rows": table}))
