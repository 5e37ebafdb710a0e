"""Layout: which KV heads attend globally, and which only to a local window and the first tokens (sink tokens).

Local heads have one window, or several, each with a letter of its own that a legend explains.

Layouts connect the pipeline stages: ``propose`` writes them, ``train-hybrid`` trains them and ``export`` applies one to
a model. A layout is a small YAML file whose grid of letters can be read and edited by hand.

The file contains a hash of its window, sinks and grid (``provenance: {hash: ...}``) to detect edits. Edits are allowed,
so an edited layout is read as it is. But its strategy, budget and coverage still describe the original grid, and labels
such as "densest" would then be wrong in a comparison. So reading it warns until the hash is removed or the layout is
written again. ``check`` is the corresponding hash of the provenance, to detect damage; the strategy may be renamed.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from spkv_nas.artifacts.grid import OnGrid, grid_html, grid_words
from spkv_nas.base import files, hub, limits, names, schema
from spkv_nas.base.arguments import convert
from spkv_nas.base.errors import UserError, shortened

FORMAT = "spkv-nas/layout/1"
FILE = "layout.yaml"  # in the folder of an export
DEFAULT_WINDOW = 128  # of local heads, if neither the probe nor the caller sets one

GLOBAL = "G"
# Letters of local heads, by window, the narrowest first; S are gated heads of other grids
LOCAL = "LMNOPQRTUVWXYZ"
_GRID_COMMENT = "# one row per layer from layer 0, one letter per KV head: G global, {} local"
_WINDOW = "window: {:<19} # visible recent keys of a local head, its own included"
_WINDOWS = "windows: {:<18} # visible recent keys of a local head, its own included, by its letter"
_SINKS = "sinks: {:<20} # first tokens of the sequence that a local head also sees\n"
_TEMPLATE = """\
format: {format}
{window}
{sinks}heads:                      {comment}
{rows}
strategy: {strategy}
provenance: {provenance}
"""


@dataclass(frozen=True)
class Layout(OnGrid):
    """Hybrid layout: which KV heads are global (SP-KV paper, section "Designing Stronger Hybrids").

    Example::

        layout = spkv_nas.Layout(("GL", "LL", "LL", "GG"), window=128, sinks=1)  # 4 layers of 2 KV heads
        layout.num_global, layout.global_mask  # 3, bool [L, Hkv]
        layout.write("layouts/mine.yaml")
        spkv_nas.Layout(("GL", "MM"), windows={"L": 64, "M": 512})  # local heads with two windows

    Attributes:
        heads: one row per layer, one letter per KV head: ``"G"`` global, ``"L"`` local; with several windows the other
            letters of ``LOCAL``, "L" for the narrowest, whichever letters the layout was made with. Rows are as long
            as their layer has heads, so they may differ in length.
        window: recent keys that a local head sees, including the query's own; with several windows the narrowest.
        strategy: how the layout was made; also names its files and runs.
        provenance: where the layout comes from; affects neither the layout nor its coverage. ``Proposal.read`` uses one
            entry, ``tau``: the threshold of the densities by which the layout was chosen.
        sinks: first tokens of its sequence that a local head sees besides its window (sink tokens).
        windows: windows of local heads by their letter, narrowest first, if there are several; empty with one window.

    Raises ``UserError``: the grid or a row is empty, or has another letter, a window is below 1 or has no head, two
    letters have the same window, the sinks are negative, or the strategy cannot name a file.
    """

    heads: tuple[str, ...]
    window: int = 0
    strategy: str = "custom"
    provenance: Mapping[str, object] = field(default_factory=dict, hash=False)
    sinks: int = field(default=0, kw_only=True)
    windows: Mapping[str, int] = field(default_factory=dict, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        """Validate the grid, the windows, the sinks and the strategy."""
        heads = convert(
            "heads",
            Sequence[str],
            self.heads,
            remedy="give one row per layer, one letter per KV head",
        )
        # Store Python's own types, which YAML can represent
        object.__setattr__(self, "heads", tuple(heads))
        object.__setattr__(self, "window", convert("window", int, self.window))
        object.__setattr__(self, "sinks", convert("sinks", int, self.sinks))
        windows = convert(
            "windows",
            Mapping[str, int],
            self.windows,
            remedy="give for example {'L': 128, 'M': 512}",
        )
        legend = dict(windows) or {LOCAL[0]: self.window}
        self._check_grid(legend)
        # Check windows, sinks and strategy
        _check_range(legend, has_legend=bool(windows))
        if windows:
            self._check_legend(legend)
        if not 0 <= self.sinks <= limits.MAX_WINDOW:
            raise UserError(
                f"sinks is {str(self.sinks)[:40]}; it must lie between 0 and {limits.MAX_WINDOW}"
            )
        names.check_name(convert("strategy", str, self.strategy), "the strategy")
        # Give the letters of ``LOCAL``, so that equal layouts have equal letters
        letters = sorted(legend, key=lambda letter: legend[letter])
        renamed = str.maketrans(dict(zip(letters, LOCAL, strict=False)))
        ordered = [legend[letter] for letter in letters]
        several = dict(zip(LOCAL, ordered, strict=False)) if len(ordered) > 1 else {}
        object.__setattr__(self, "heads", tuple(row.translate(renamed) for row in self.heads))
        object.__setattr__(self, "window", ordered[0])
        object.__setattr__(self, "windows", several)

    def _check_grid(self, legend: Mapping[str, int]) -> None:
        """Raise ``UserError`` for a grid or a row that is empty, or a letter that is not in the legend."""
        if not all(self.heads) or not self.heads:
            raise UserError(
                "the grid 'heads' is empty; give one row per layer, one letter per KV head"
            )
        for layer, row in enumerate(self.heads):
            if set(row) - {GLOBAL, *legend}:
                letters = " and ".join(f"{letter} (local)" for letter in legend)
                raise UserError(
                    f"layer {layer} is {row[:100]!r}; allowed letters are G (global) and {letters}"
                )

    def _check_legend(self, legend: Mapping[str, int]) -> None:
        """Raise ``UserError`` for a legend that does not fit the grid."""
        if wrong := [letter for letter in legend if letter not in LOCAL or len(letter) != 1]:
            raise UserError(
                f"windows: {wrong[0][:40]!r} is no letter of a local head; they are "
                f"{', '.join(LOCAL)}"
            )
        if unused := [letter for letter in legend if letter not in "".join(self.heads)]:
            raise UserError(f"windows: no head is {unused[0]}; leave its window out")
        if len(set(legend.values())) < len(legend):
            raise UserError(
                "windows: two letters have the same window; give their heads one letter"
            )
        if self.window and self.window != min(legend.values()):
            raise UserError(
                f"window is {self.window}, but windows are {_listed(legend)}: give one window or "
                "several"
            )

    @property
    def heads_per_layer(self) -> tuple[int, ...]:
        """Return the number of KV heads of every layer, the length of its row."""
        return tuple(map(len, self.heads))

    @property
    def num_global(self) -> int:
        """Return the number of global KV heads, which is the budget of the layout."""
        return sum(row.count("G") for row in self.heads)

    @property
    def global_mask(self) -> npt.NDArray[np.bool_]:
        """Return a bool mask [L, Hkv], true where the KV head is global; false beyond the heads of a layer."""
        mask: npt.NDArray[np.bool_] = np.array(self.heads).view("U1").reshape(self.grid) == GLOBAL
        return mask

    @property
    def head_windows(self) -> tuple[tuple[int | None, ...], ...]:
        """Return the window of every KV head, by layer; None for global heads."""
        return tuple(tuple(self.legend.get(letter) for letter in row) for row in self.heads)

    @property
    def legend(self) -> dict[str, int]:
        """Return the window of every letter of local heads, narrowest first; ``{"L": window}`` with one window."""
        return dict(self.windows) or {LOCAL[0]: self.window}

    @property
    def is_layerwise(self) -> bool:
        """Return whether every layer is all global or all local."""
        return all(len(set(row)) == 1 for row in self.heads)

    @property
    def global_layers(self) -> tuple[int, ...]:
        """Return the layers whose KV heads are all global, ascending."""
        return tuple(layer for layer, row in enumerate(self.heads) if set(row) == {GLOBAL})

    @property
    def reach(self) -> str:
        """Return what local heads see, for people: "window 128, 4 sink tokens", "windows L 128, M 512"."""
        words = f"windows {_listed(self.windows)}" if self.windows else f"window {self.window}"
        if self.sinks:
            words += f", {self.sinks} sink token{'s' if self.sinks > 1 else ''}"
        return words

    @property
    def legend_words(self) -> str:
        """Return what local heads see, with what the letters of several windows mean, for where they first appear."""
        if not self.windows:
            return self.reach
        meaning = f"heads of {LOCAL[0]} see the last {self.window} keys"
        return f"{self.reach} (a letter for each window: {meaning})"

    @property
    def description(self) -> str:
        """Return the shape, the share of global heads, window, sink tokens and hash in one line."""
        percent = 100 * self.num_global / self.num_heads
        share = f"{self.num_global} of {self.num_heads} global ({percent:.1f} %)"
        return f"{grid_words(self.heads_per_layer)}, {share}, {self.reach}, hash {self.hash}"

    @property
    def content(self) -> str:
        """Return windows, grid and sinks (if any) as text: only what affects the model."""
        windows = " ".join(map(str, self.legend.values()))
        rows = "/".join(self.heads)
        sinks = f"\nsinks {self.sinks}" if self.sinks else ""
        return f"{windows}\n{rows}{sinks}"

    def check_one_window(self, what: str) -> None:
        """Raise ``UserError`` if local heads have several windows, and say ``what`` is impossible."""
        if self.windows:
            raise UserError(
                f"layout '{self.strategy}' has {len(self.windows)} windows of local heads: {what}"
            )

    @property
    def content_hash(self) -> str:
        """Return the first 16 hexadecimal digits of the SHA-256 of ``content``.

        The hash names finished runs, so it must not change in format 1; a later format must prefix the hashed text with
        its name.
        """
        return hashlib.sha256(self.content.encode()).hexdigest()[:16]

    @property
    def hash(self) -> str:
        """Return the first 8 digits of ``content_hash``, the short id in the file."""
        return self.content_hash[:8]

    @property
    def check(self) -> str:
        """Return 8 hexadecimal digits that hash the provenance; stored in the file beside ``hash``."""
        return hashlib.sha256(files.yaml_line(dict(self.provenance)).encode()).hexdigest()[:8]

    def _repr_html_(self) -> str:
        """Return an HTML grid with G for every global head, for notebooks."""
        caption = (
            f"{self.strategy}: {self.num_global} of {self.num_heads} KV heads global, {self.reach}"
        )
        return grid_html(caption, self.global_mask, [row.replace("L", " ") for row in self.heads])

    @classmethod
    def from_windows(cls, windows: Sequence[Sequence[int | None]], **settings: Any) -> Layout:
        """Create a layout from the window of every KV head, by layer; None for global heads.

        ``settings`` are the other arguments of the constructor. Without a local head, the window is ``DEFAULT_WINDOW``.
        """
        widths = {window for row in windows for window in row if window is not None}
        legend = dict(zip(LOCAL, sorted(widths), strict=False))
        letters: dict[int | None, str] = {window: letter for letter, window in legend.items()}
        letters[None] = GLOBAL
        # More windows than letters have "?", which the constructor refuses
        heads = tuple("".join(letters.get(window, "?") for window in row) for row in windows)
        return cls(heads, 0 if legend else DEFAULT_WINDOW, windows=legend, **settings)

    @classmethod
    def from_mask(
        cls,
        mask: npt.ArrayLike,
        *,
        window: int,
        strategy: str = "custom",
        provenance: Mapping[str, object] | None = None,
        sinks: int = 0,
        heads_per_layer: Sequence[int] | None = None,
    ) -> Layout:
        """Create a layout whose global heads are true in ``mask``, bool [L, Hkv]; ``heads_per_layer``: Hkv if None."""
        grid = np.asarray(mask)
        if grid.ndim != 2 or grid.dtype != np.bool_:
            raise UserError(f"mask must be bool [L, Hkv], found {grid.dtype} {list(grid.shape)}")
        sizes = heads_per_layer or [grid.shape[1]] * len(grid)
        letters = np.where(grid, GLOBAL, LOCAL[0])
        heads = ["".join(row[:size]) for row, size in zip(letters, sizes, strict=True)]
        return cls(tuple(heads), window, strategy, provenance or {}, sinks=sinks)

    @classmethod
    def read(cls, path: files.StrPath) -> Layout:
        """Read a layout from a YAML file and verify its hash and check, which are not part of ``provenance``.

        ``hub:ORG/NAME[@REVISION]`` reads ``FILE`` of a model repository on the Hugging Face Hub, as exports have it.

        Raises:
            UserError: the file is invalid (names the key or layer, and what was expected), or cannot be downloaded.

        Warns:
            UserWarning: the file was edited after it was written, or it is truncated.
        """
        # Parse and validate
        where = f"layout {path}"
        text = files.read_text(hub.local_file(path, FILE, "layout"), "layout")
        data = files.parse_yaml(text, where)
        _check_format(data, where)
        content = schema.validate(_LayoutFile, data, where)
        # Warn if the file is truncated
        if "provenance" not in data and _GRID_COMMENT.partition("{")[0] in text:
            warnings.warn(
                f"{where} is truncated: its last section, provenance, is missing\n"
                "if this is intended, also remove the comment after 'heads'",
                stacklevel=2,
            )
        # Build the layout without hash and check
        provenance = {
            key: value for key, value in content.provenance.items() if key not in ("hash", "check")
        }
        try:
            if content.window is None and content.windows is None:
                raise UserError("the key 'window' is missing")
            layout = cls(
                tuple(content.heads),
                content.window or 0,
                content.strategy,
                provenance,
                sinks=content.sinks,
                windows=content.windows or {},
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        layout._warn_if_edited(where, content.provenance)
        return layout

    def _warn_if_edited(self, where: str, provenance: Mapping[str, object]) -> None:
        """Warn, for the caller of ``read``, if hash or check in a file are not those of its layout."""
        recorded_hash = provenance.get("hash") or self.hash
        recorded_check = provenance.get("check") or self.check
        if str(recorded_hash) != self.hash:
            warnings.warn(
                f"{where} was edited after it was written (its hash was {recorded_hash}, now "
                f"{self.hash}): its strategy '{self.strategy}' and provenance describe the "
                "previous grid\n"
                "if the edit is intended, rename the strategy and remove the hash from the file",
                stacklevel=3,
            )
        elif str(recorded_check) != self.check:
            warnings.warn(
                f"{where}: its provenance was changed after it was written\n"
                "if this is intended, remove the key 'check' from the file",
                stacklevel=3,
            )

    @staticmethod
    def json_schema() -> dict[str, object]:
        """Return the JSON Schema of the YAML file."""
        return _LayoutFile.model_json_schema()

    @property
    def words(self) -> str:
        """Return the grid as a word per layer, and with several windows one for each: "GLM LLL L=128 M=512"."""
        return " ".join(
            [*self.heads, *(f"{letter}={window}" for letter, window in self.windows.items())]
        )

    @classmethod
    def from_words(
        cls, words: str, window: int | None, strategy: str = "custom", *, sinks: int = 0
    ) -> Layout:
        """Create a layout from ``words``, which have no windows if all local heads have ``window``."""
        rows: list[str] = []
        legend: dict[str, int] = {}
        for word in words.split():
            letter, equals, number = word.partition("=")
            if equals:
                # The constructor refuses a window of 0
                legend[letter] = int(number) if number.isdecimal() else 0
            else:
                rows.append(word)
        one_window = 0 if legend else window or 0
        return cls(tuple(rows), one_window, strategy, sinks=sinks, windows=legend)

    @property
    def rows(self) -> str:
        """Return the lines of the grid in the file."""
        return "\n".join(f"  - {files.yaml_line(row)}" for row in self.heads)

    @property
    def text(self) -> str:
        """Return the YAML file; ``provenance`` must hold plain values (text, numbers, lists, mappings)."""
        window = _WINDOW.format(self.window)
        if self.windows:
            window = _WINDOWS.format(files.yaml_line(self.windows))
        return _TEMPLATE.format(
            format=FORMAT,
            window=window,
            sinks=_SINKS.format(self.sinks) if self.sinks else "",
            comment=_GRID_COMMENT.format(", ".join(self.legend)),
            rows=self.rows,
            strategy=files.yaml_line(self.strategy),
            provenance=files.yaml_line({**self.provenance, "hash": self.hash, "check": self.check}),
        )

    def write(self, path: files.StrPath) -> None:
        """Write ``text`` atomically."""
        files.write_atomic(Path(path), self.text)


def _check_format(data: Mapping[str, object], where: str) -> None:
    """Raise ``UserError`` if a layout file is of another format, or says none."""
    if data.get("format") == FORMAT:
        return
    problem = "the key 'format' is missing"
    if "format" in data:
        problem = f"the format is {shortened(repr(data['format']), 40)}"
    raise UserError(f"{where}: {problem}; this version reads 'format: {FORMAT}'")


def _check_range(legend: Mapping[str, int], *, has_legend: bool) -> None:
    """Raise ``UserError`` for a window out of range; without a legend it has no letter."""
    for letter, window in legend.items():
        name = f"the window of {letter}" if has_legend else "window"
        if window < 1:
            raise UserError(
                f"{name} is {window}; it must be at least 1, because it includes the query's own "
                "key"
            )
        if window > limits.MAX_WINDOW:
            raise UserError(f"{name} is {str(window)[:40]}; it is at most {limits.MAX_WINDOW}")


def _listed(windows: Mapping[str, int]) -> str:
    """Return windows by letter for people: "L 128, M 512"."""
    return ", ".join(f"{letter} {window}" for letter, window in windows.items())


class _LayoutFile(schema.Section):
    """Schema of the layout file; ``Layout`` checks the values and has clearer messages."""

    model_config = ConfigDict(
        title="spkv-nas layout",
        json_schema_extra={
            "description": "For every KV head of a decoder: global attention or a local window."
        },
    )

    format: str = Field(json_schema_extra={"const": FORMAT})
    window: int | None = Field(
        None,
        description="window of local heads: visible recent keys, including the query's own",
        json_schema_extra={"minimum": 1},
    )
    windows: dict[str, int] | None = Field(
        None,
        description="in place of 'window': windows of local heads by their letter, such as {L: "
        "128, M: 512}",
        json_schema_extra={"additionalProperties": {"type": "integer", "minimum": 1}},
    )
    sinks: int = Field(
        0,
        description="first tokens of the sequence that a local head sees besides its window; "
        "absent: 0",
        json_schema_extra={"minimum": 0},
    )
    heads: list[str] = Field(
        description="one row per layer from layer 0, one letter per KV head: G global, L or one "
        "of 'windows' local",
        json_schema_extra={"minItems": 1, "items": {"type": "string", "pattern": "^[GL-RT-Z]+$"}},
    )
    strategy: str = Field(
        "custom", description="how the layout was chosen; its name in comparisons"
    )
    provenance: dict[str, Any] = Field(
        {},
        description="origin of the layout, hash of window, sinks and heads, and checksum of the "
        "other fields",
    )
