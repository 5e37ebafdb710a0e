"""A layout: for every KV head, whether it attends globally or only within a local window.

The layout is the hand-over between the stages: ``propose`` writes layouts, ``train-hybrid`` trains them,
``export`` puts one on a model. It is a small YAML file whose grid of letters can be read and edited by hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import BaseModel, ConfigDict

from spkv_nas.errors import UserError
from spkv_nas.files import read_yaml, validate, write_atomic

FORMAT = "spkv-nas/layout/1"
DEFAULT_WINDOW = 128  # of local heads, where neither the probe nor the caller says one

_TEMPLATE = """\
format: {format}
window: {window:<19} # visible recent keys of a local head, its own included
heads:                      # one row per layer from layer 0, one letter per KV head: G global, L local
{rows}
strategy: {strategy}
provenance: {provenance}
"""


@dataclass(frozen=True)
class Layout:
    """Which KV heads are global (SP-KV paper, section "Designing Stronger Hybrids").

    ``heads`` has one row per layer, one letter per KV head: ``"G"`` global, ``"L"`` local. ``window`` is the
    number of recent keys a local head sees, the query's own included. ``provenance`` says where the layout comes
    from and changes nothing about it. Raises ``UserError`` for an empty or ragged grid, another letter, or a
    window below 1.
    """

    heads: tuple[str, ...]
    window: int
    strategy: str = "custom"
    provenance: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.heads or not self.heads[0]:
            raise UserError("the grid 'heads' is empty; give one row per layer, one letter per KV head")
        for layer, row in enumerate(self.heads):
            if set(row) - {"G", "L"}:
                raise UserError(f"layer {layer} is {row!r}; its letters must be G (global) or L (local)")
            if len(row) != self.num_kv_heads:
                raise UserError(
                    f"layer {layer} is {row!r}, {len(row)} KV heads, but layer 0 has {self.num_kv_heads}; "
                    "all rows must be equally long"
                )
        if self.window < 1:
            raise UserError(f"window is {self.window}; it counts the query's own key: at least 1")

    @property
    def num_layers(self) -> int:
        """Number of layers, L."""
        return len(self.heads)

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads per layer, Hkv."""
        return len(self.heads[0])

    @property
    def num_heads(self) -> int:
        """Number of KV heads in the model, L * Hkv."""
        return self.num_layers * self.num_kv_heads

    @property
    def num_global(self) -> int:
        """Number of global KV heads: the budget this layout spends."""
        return sum(row.count("G") for row in self.heads)

    @property
    def global_mask(self) -> npt.NDArray[np.bool_]:
        """Bool [L, Hkv], true where the KV head is global."""
        return np.array([[letter == "G" for letter in row] for row in self.heads])

    @property
    def is_layerwise(self) -> bool:
        """Whether every layer is all global or all local."""
        return all(len(set(row)) == 1 for row in self.heads)

    @property
    def global_layers(self) -> tuple[int, ...]:
        """Layers whose KV heads are all global, ascending."""
        return tuple(layer for layer, row in enumerate(self.heads) if "L" not in row)

    @property
    def content_hash(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of grid and window (nothing else counts)."""
        return hashlib.sha256(f"{self.window}\n{'/'.join(self.heads)}".encode()).hexdigest()[:16]

    @classmethod
    def from_mask(
        cls,
        mask: npt.ArrayLike,
        *,
        window: int,
        strategy: str = "custom",
        provenance: Mapping[str, object] | None = None,
    ) -> Layout:
        """The layout whose global heads are the true entries of ``mask``, bool [L, Hkv]."""
        grid = np.asarray(mask)
        if grid.ndim != 2 or grid.dtype != np.bool_:
            raise ValueError(f"mask must be bool [L, Hkv], found {grid.dtype} {list(grid.shape)}")
        heads = tuple("".join("G" if is_global else "L" for is_global in row) for row in grid)
        return cls(heads, window, strategy, provenance or {})

    @classmethod
    def read(cls, path: Path) -> Layout:
        """The layout in a YAML file. Raises ``UserError`` naming the file, the key or layer, what was expected."""
        where = f"layout {path}"
        data = read_yaml(path, "layout")
        if data.get("format") != FORMAT:
            found = f"the format is {data['format']!r}" if "format" in data else "the key 'format' is missing"
            raise UserError(f"{where}: {found}; this version reads 'format: {FORMAT}'")
        content = validate(_LayoutFile, data, where)
        try:
            return cls(tuple(content.heads), content.window, content.strategy, content.provenance)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def write(self, path: Path) -> None:
        """Write the YAML file atomically; ``provenance`` holds plain values (text, numbers, lists, mappings)."""
        content = _TEMPLATE.format(
            format=FORMAT,
            window=self.window,
            rows="\n".join(f"  - {row}" for row in self.heads),
            strategy=_inline(self.strategy),
            provenance=_inline(dict(self.provenance)),
        )
        write_atomic(path, content)


class _LayoutFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    format: str
    window: int
    heads: list[str]
    strategy: str = "custom"
    provenance: dict[str, Any] = {}


class _InlineDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # the strict reader refuses aliases


def _inline(value: object) -> str:
    """``value`` as YAML on one line."""
    text: str = yaml.dump(
        value,
        Dumper=_InlineDumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
    )
    return text.removesuffix("\n").removesuffix("\n...")
