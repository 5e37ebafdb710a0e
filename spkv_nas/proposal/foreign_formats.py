"""Exchange with DuoAttention and PruLong: their files as per-head scores, as layouts, and written from layouts.

Both hold one value per KV head in a text file without a header: one line per layer from layer 0, values separated by
tabs, 1 for full attention and 0 for streaming (some first keys, "sinks", and a window). Neither averages over query
heads: the value is learned per KV head and shared by its group of query heads.

DuoAttention (arXiv 2410.10819; repository mit-han-lab/duo-attention, commit 03dca84), a folder with two files:

- ``full_attention_heads.tsv``: alpha [L, Hkv], as ``numpy.savetxt`` writes it. Training clamps alpha to [0, 1] before a
  step and saves after one (``duo_attn/train.py``), so published files go down to -2.4e-4 and the loader clips them.
- ``config.json``: the arguments of the run, of which the loader wants ``sink_size`` and ``recent_size`` (published: 128
  and 256). In the training mask ``recent_size`` counts the query's own key (``duo_attn/patch/streaming_attn.py``), as
  our window does; its cached decoding keeps that many beside it (``duo_attn/patch/llama.py``).

A sparsity s becomes a threshold there: uniform noise in [0, 1e-6) is added to break ties, and a head stays global
where alpha >= quantile(alpha, s), interpolated linearly; s >= 1 leaves none, s <= 0 all (``duo_attn/utils.py``).

PruLong (arXiv 2506.17121; repository princeton-pli/PruLong, read in the copy qqtang-code/PruLong, commits 41c2511 and
ff22598): one file, by default in the folder of the checkpoint (``prulong/save_prulong_masks.py``):

- ``masks.tsv``: the mask [L, Hkv] cut at 0.5, 1.0 or 0.0. ``masks_sp<s>.tsv``: 1.0 for the int((1 - s) L Hkv) highest
  masks, ties by a seeded draw (``prulong/training/modeling_flash_llama.py``). Lines end in CR LF.
- ``config.json`` of that checkpoint has ``sink_size`` and ``local_window_size`` (defaults 128 and 1024).

Its evaluation reads both projects' files, takes sinks and window from flags, and cuts at DuoAttention's quantile, also
where the file is a mask already (``eval/model_utils.py``).

Here a sparsity means that quantile, without the noise: among equal scores the earlier layer and head stays global, as
in every strategy. ``hash`` and strategy of a layout go into DuoAttention's ``config.json``, which has room for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from spkv_nas.artifacts.density import COLUMNS, DensityTable
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_text, write_atomic
from spkv_nas.base.version import __version__
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.proposal.strategies import densest

DUO_ATTENTION, PRULONG = "duo-attention", "prulong"
_TSV, _CONFIG = "full_attention_heads.tsv", "config.json"
_CREATED_BY = f"spkv-nas {__version__}"
_OVERSHOOT = 0.01  # outside [0, 1] by at most this is clipped: the last step, at DuoAttention's default rate


@dataclass(frozen=True, eq=False)
class HeadScores:
    """A score per KV head, higher for heads that need global attention.

    Attributes:
        values: [L, Hkv] in [0, 1].
        origin: "duo-attention" (alpha), "prulong" (mask), or "density".
        source: the file, as it was named.
        window: visible recent keys of a local head, its own included; None when no file says it.
        sink_size: first keys that a local head sees besides its window; None when no file says it.
    """

    values: NDArray[np.float64]
    origin: str
    source: str
    window: int | None = None
    sink_size: int | None = None

    @property
    def is_mask(self) -> bool:
        """Whether every value is 0 or 1: the heads have been chosen."""
        return bool(np.isin(self.values, (0.0, 1.0)).all())

    def table(self, name: str) -> DensityTable:
        """The scores in place of densities, for ``propose``; ``metadata`` records what they are and their file."""
        layer, head = (axis.ravel() for axis in np.indices(self.values.shape))
        rows = pd.DataFrame({"layer": layer, "kv_head": head, "density": self.values.ravel()}).assign(
            domain="all", num_tokens=1, num_documents=0, standard_error=math.nan
        )
        metadata = {"signal": self.origin, "source": self.source, "sink_size": self.sink_size}
        return DensityTable(name, rows[list(COLUMNS)], window=self.window, metadata=metadata)

    def choose(
        self, *, budget: int | str | None = None, sparsity: float | None = None, threshold: float | None = None
    ) -> NDArray[np.bool_]:
        """Bool [L, Hkv], true where the head stays global; with no option the mask that the scores are already.

        Args:
            budget: that many heads of highest score, or a share such as "25%".
            sparsity: in [0, 1]; local are the heads below this quantile of the scores, as DuoAttention and PruLong do.
            threshold: in [0, 1]; global are the heads with at least this score.

        Raises:
            UserError: more than one option, one out of range, or none for scores that are no mask.
        """
        options = {"budget": budget, "sparsity": sparsity, "threshold": threshold}
        given = [f"--{name}" for name, value in options.items() if value is not None]
        if len(given) > 1:
            raise UserError(f"give one of {', '.join(given)}: each alone says which heads are global")
        for name, value in (("sparsity", sparsity), ("threshold", threshold)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise UserError(f"--{name} must lie in [0, 1]; found {value:g}")
        if budget is not None:
            return densest(self.values, parse_budget(budget, self.values.size))
        if sparsity is not None:
            return densest(self.values, self.values.size - num_local(sparsity, self.values.size))
        if threshold is None and not self.is_mask:
            raise UserError(
                f"{self.source} holds scores between 0 and 1, which do not say which heads are global\n"
                "add --budget N, --sparsity S or --threshold T (both projects cut at 0.5 by default)"
            )
        return np.asarray(self.values >= (0.5 if threshold is None else threshold))


def num_local(sparsity: float, num_heads: int) -> int:
    """Number of scores below their quantile at ``sparsity`` in [0, 1] (linear interpolation), all of them distinct."""
    if sparsity in (0.0, 1.0):
        return int(sparsity * num_heads)
    return math.ceil(sparsity * (num_heads - 1) - 1e-9)  # a quantile that falls on a score keeps its head global


def is_layout(path: Path) -> bool:
    """Whether the name is a layout file's."""
    return path.suffix in (".yaml", ".yml")


def read_scores(path: Path) -> HeadScores:
    """Scores from a DuoAttention folder, a ``.tsv`` of either project, or a density table (``.csv``).

    Window and sinks come from the ``config.json`` beside a ``.tsv``. A file is DuoAttention's if that config has
    ``recent_size`` or the name starts with ``full_attention_heads``, else PruLong's.

    Raises:
        UserError: naming the file, and line and column where there are; also for a shape other than the config's.
    """
    if path.suffix == ".csv":
        table = DensityTable.read(path)
        return HeadScores(table.density, "density", str(path), table.window, sink_size=0)
    file = path / _TSV if path.is_dir() else path
    if file.suffix != ".tsv":
        raise UserError(f"{path} is none of: a layout (.yaml), head scores (.tsv, .csv), a folder with {_TSV}")
    values = _read_values(file)
    config = _read_config(file.parent / _CONFIG)
    expected = tuple(config.get(key, size) for key, size in zip(_SHAPE_KEYS, values.shape, strict=True))
    if expected != values.shape:
        raise UserError(
            f"head scores {file}: {values.shape[0]} layers x {values.shape[1]} KV heads, but {_CONFIG} beside it says "
            f"{expected[0]} x {expected[1]}\none value per KV head, not per query head"
        )
    duo = "recent_size" in config or file.name.startswith("full_attention_heads")
    window = config.get("recent_size", config.get("local_window_size"))
    return HeadScores(values, DUO_ATTENTION if duo else PRULONG, str(path), window, config.get("sink_size"))


def read_score_table(path: Path) -> DensityTable:
    """A ``.tsv`` as a density table, called after the file, or its folder where that is ``full_attention_heads``."""
    folder = path.stem.startswith("full_attention_heads")
    return read_scores(path).table(path.resolve().parent.name if folder else path.stem)


def convert(
    source: Path,
    target: Path,
    *,
    budget: int | str | None = None,
    sparsity: float | None = None,
    threshold: float | None = None,
    window: int | None = None,
) -> list[str]:
    """Write a layout or scores in another form; sentences that say what was written and what could not be carried.

    The target's name decides its form: ``.yaml`` a layout, ``.tsv`` a PruLong mask, ``full_attention_heads.tsv`` or a
    folder DuoAttention's two files. Scores stay scores from one project to DuoAttention unless an option of
    ``HeadScores.choose`` cuts them. ``window`` replaces that of the source.

    Raises:
        UserError: a form is unknown or damaged, the target exists, or the options do not fit the source.
    """
    files = _target_files(target)
    options = {"budget": budget, "sparsity": sparsity, "threshold": threshold}
    chosen = {name: value for name, value in options.items() if value is not None}
    if window is not None and window < 1:
        raise UserError(f"--window is {window}; it counts the query's own key: at least 1")
    layout = Layout.read(source) if is_layout(source) else None
    if layout is None:
        scores, notes = _with_sizes(read_scores(source), window)
    elif chosen:
        raise UserError(f"{source} is a layout, which has chosen its heads: --{next(iter(chosen))} is for scores")
    else:
        layout, notes = replace(layout, window=window or layout.window), []
        mask = layout.global_mask.astype(np.float64)
        scores = HeadScores(mask, layout.strategy, f"{layout.strategy} {layout.hash}", layout.window, sink_size=0)
    duo = files[0].name == _TSV
    if layout is None and (chosen or not duo):
        layout, ties = _chosen_layout(scores, chosen)
        scores, notes = replace(scores, values=layout.global_mask.astype(np.float64)), notes + ties
    if duo:
        return [*notes, _write_duo_attention(files, scores)]
    assert layout is not None
    return notes + (_write_layout if is_layout(target) else _write_prulong)(target, layout, scores.sink_size or 0)


def _with_sizes(scores: HeadScores, window: int | None) -> tuple[HeadScores, list[str]]:
    """The scores with a window (the one given, their own, or the default) and sinks, and a sentence on a guess."""
    window = window or scores.window
    guesses = []
    if window is None:
        guesses.append(f"the window as {DEFAULT_WINDOW} (--window W sets it)")
    if scores.sink_size is None:
        guesses.append("the sinks as none")
    notes = [f"{scores.source} comes without sizes: took {' and '.join(guesses)}"] if guesses else []
    return replace(scores, window=window or DEFAULT_WINDOW, sink_size=scores.sink_size or 0), notes


def _chosen_layout(scores: HeadScores, chosen: dict[str, Any]) -> tuple[Layout, list[str]]:
    """The layout of the chosen heads, and a sentence if the cut falls among equal scores."""
    assert scores.window is not None
    mask = scores.choose(**chosen)
    provenance = {"source": scores.source, **chosen, "budget": int(mask.sum()), "created_by": _CREATED_BY}
    layout = Layout.from_mask(mask, window=scores.window, strategy=scores.origin, provenance=provenance)
    if mask.all() or not mask.any() or scores.values[mask].min() > scores.values[~mask].max():
        return layout, []
    tied = scores.values == scores.values[mask].min()
    return layout, [
        f"{tied.sum()} heads score {scores.values[mask].min():g} and {(tied & mask).sum()} of them are global: "
        "among equals the earlier layer and head"
    ]


def _target_files(target: Path) -> list[Path]:
    """The files that a conversion writes. Raises ``UserError`` where one exists or the form is unknown."""
    if is_layout(target) or (target.suffix == ".tsv" and target.name != _TSV):
        files = [target]
    elif target.name == _TSV:
        files = [target, target.parent / _CONFIG]
    elif target.suffix[1:].isalpha() and not target.is_dir():
        raise UserError(f"{target}: write .yaml (a layout), .tsv (a PruLong mask), or a folder (DuoAttention)")
    else:
        files = [target / _TSV, target / _CONFIG]
    for file in files:
        if file.exists():
            raise UserError(f"{file} exists: choose another name")
    return files


def _write_duo_attention(files: Sequence[Path], scores: HeadScores) -> str:
    sizes = {"sink_size": scores.sink_size, "recent_size": scores.window}
    config = {**sizes, "source": scores.source, "created_by": _CREATED_BY}
    write_atomic(files[1], json.dumps(config, indent=2) + "\n")
    write_atomic(files[0], _lines(scores.values, "{:.18e}"))
    what = f"{int(scores.values.sum())} of {scores.values.size} KV heads global" if scores.is_mask else "scores"
    return f"{files[0]}: {what}, {scores.sink_size} sinks, window {scores.window}"


def _write_layout(target: Path, layout: Layout, sinks: int) -> list[str]:
    layout.write(target)
    lost = f"not carried: {sinks} sinks; a layout's local heads see their window of {layout.window} alone"
    written = f"{target}: {layout.num_global} of {layout.num_heads} KV heads global, hash {layout.hash}"
    return [written, lost] if sinks else [written]


def _write_prulong(target: Path, layout: Layout, sinks: int) -> list[str]:
    write_atomic(target, _lines(layout.global_mask.astype(np.float64), "{:.1f}"))
    return [
        f"{target}: {layout.num_global} of {layout.num_heads} KV heads global",
        f"not carried: the sizes; evaluate with --duoattn_sliding {layout.window} --duoattn_sink {sinks}",
    ]


def _lines(values: NDArray[np.float64], number: str) -> str:
    return "".join("\t".join(number.format(value) for value in row) + "\n" for row in values)


def _read_values(file: Path) -> NDArray[np.float64]:
    """[L, Hkv] in [0, 1]. Raises ``UserError`` naming line and column."""
    where = f"head scores {file}"
    text = read_text(file, "head scores").removeprefix("\ufeff")
    lines = [(i, line.split("\t")) for i, line in enumerate(text.split("\n"), 1) if line.strip() and line[0] != "#"]
    if not lines:
        raise UserError(f"{where}: the file is empty; it has one line per layer, one value per KV head")
    for line, cells in lines:
        if len(cells) != len(lines[0][1]):
            raise UserError(f"{where}, line {line}: {len(cells)} values, but {len(lines[0][1])} in the first line")
    return np.array([[_number(cell, f"{where}, line {i}, column {j}") for j, cell in enumerate(cells, 1)]
                     for i, cells in lines])  # fmt: skip


def _number(cell: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not -_OVERSHOOT <= value <= 1.0 + _OVERSHOOT:
        found = cell if len(cell) <= 20 else cell[:20] + "..."
        raise UserError(f"{where}: expected a number in [0, 1], tabs between; found {found!r}")
    return min(max(value, 0.0), 1.0)


_SHAPE_KEYS = ("num_hidden_layers", "num_key_value_heads")
_SIZE_KEYS = {"sink_size": 0, "recent_size": 1, "local_window_size": 1, **dict.fromkeys(_SHAPE_KEYS, 1)}


def _read_config(file: Path) -> dict[str, int]:
    """The sizes that a ``config.json`` has, null ones left out; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        data = json.loads(read_text(file, "config"))
    except json.JSONDecodeError as error:
        raise UserError(f"config {file} is not valid JSON: line {error.lineno}, {error.msg}") from error
    if not isinstance(data, dict):
        raise UserError(f"config {file}: expected keys and values, found {type(data).__name__}")
    sizes = {key: data[key] for key in _SIZE_KEYS if data.get(key) is not None}
    for key, value in sizes.items():
        if type(value) is not int or value < _SIZE_KEYS[key]:
            raise UserError(f"config {file}: '{key}' must be a whole number from {_SIZE_KEYS[key]}; found {value!r}")
    return sizes
