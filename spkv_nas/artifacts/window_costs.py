"""Costs of windows: what each window of local heads costs each KV head, beside head scores (``windows.csv``)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from spkv_nas.artifacts import head_tables
from spkv_nas.artifacts.grid import grid_words
from spkv_nas.base import arrays, errors, files, limits, tables

MAX_NATS = 1e3  # bound of a cost
_COLUMNS = (
    tables.Column("layer", "whole"),
    tables.Column("kv_head", "whole"),
    tables.Column("domain"),
    tables.Column("window", "whole", low=1, high=limits.MAX_WINDOW),
    tables.Column("cost", "number", low=-MAX_NATS, high=MAX_NATS),
)
_ORDER = ["domain", "layer", "kv_head", "window"]


@dataclass(frozen=True, eq=False)
class WindowCosts:
    """Cost of each window to each KV head against global attention, in nats per token, to first order."""

    windows: tuple[int, ...]  # the windows, ascending, in keys
    # float64 [P, L, Hkv, W], cost by domain; negative if a head attends better locally, or appears to by chance; 0 in
    # layers that are local by design, and NaN beyond the heads of a layer
    values: arrays.Float
    domains: tuple[str, ...]  # names of the domains, sorted

    def at(self, window: int) -> arrays.Float:
        """Return the costs [P, L, Hkv] of any window, interpolated in its logarithm between those measured."""
        position = np.interp(np.log2(window), np.log2(self.windows), np.arange(len(self.windows)))
        low = min(int(position), len(self.windows) - 2) if len(self.windows) > 1 else 0
        high = min(low + 1, len(self.windows) - 1)
        share = position - low
        return np.asarray((1.0 - share) * self.values[..., low] + share * self.values[..., high])

    def only(self, windows: tuple[int, ...]) -> "WindowCosts":
        """Return the costs of some windows, interpolated where they were not measured."""
        chosen = tuple(sorted(set(windows)))
        return WindowCosts(chosen, np.stack([self.at(window) for window in chosen], -1), self.domains)

    @classmethod
    def read(cls, path: Path, heads_per_layer: Sequence[int], domains: tuple[str, ...]) -> "WindowCosts | None":
        """Read the costs, None without a file; ``UserError`` unless they have every head, domain and window once."""
        if not files.is_file(path):
            return None
        rows = tables.read_table(path, "window costs", _COLUMNS).sort_values(_ORDER)
        windows = tuple(int(window) for window in sorted(rows["window"].unique()))
        heads = [(layer, head) for layer, number in enumerate(heads_per_layer) for head in range(number)]
        product = itertools.product(domains, heads, windows)
        expected = pd.MultiIndex.from_tuples([(domain, *head, window) for domain, head, window in product])
        if len(rows) != len(expected) or not (pd.MultiIndex.from_frame(rows[_ORDER]) == expected).all():
            raise errors.UserError(
                f"window costs {path}: expected every head of {grid_words(heads_per_layer)}, domain and window once\n"
                "probe again, or remove it: only layouts of several windows, and those for another memory, need it"
            )
        costs = rows["cost"].to_numpy().reshape(len(domains), len(heads), len(windows)).swapaxes(1, 2)
        return cls(windows, np.moveaxis(head_tables.on_grid(costs, heads_per_layer), 1, -1), domains)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        index = np.nonzero(~np.isnan(self.values))
        columns = {
            "layer": index[1],
            "kv_head": index[2],
            "domain": np.array(self.domains)[index[0]],
            "window": np.array(self.windows)[index[3]],
            "cost": self.values[index],
        }
        tables.write_csv(path, pd.DataFrame(columns))
