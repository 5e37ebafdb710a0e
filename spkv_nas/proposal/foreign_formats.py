"""Convert layouts and head scores to and from the formats of DuoAttention and PruLong.

Both projects store one value per KV head in a text file without a header: one line per layer from layer 0,
tab-separated, 1 for full attention and 0 for streaming (the first keys, "sinks", plus a window). Neither averages over
query heads: the value is learned per KV head and shared by its group of query heads.

DuoAttention (arXiv 2410.10819; repository mit-han-lab/duo-attention, commit 03dca84) uses a folder with two files:

- ``full_attention_heads.tsv``: alpha [L, Hkv], as ``numpy.savetxt`` writes it. Training clamps alpha to [0, 1] before a
  step and saves it after one (``duo_attn/train.py``), so published files contain values down to -2.4e-4, which the
  loader clips.
- ``config.json``: the arguments of the training run; the loader needs ``sink_size`` and ``recent_size`` (published: 128
  and 256). In the training mask ``recent_size`` counts the query's own key (``duo_attn/patch/streaming_attn.py``), as
  our window does; its cached decoding keeps that many keys besides the query's own (``duo_attn/patch/llama.py``).

DuoAttention turns a sparsity s into a threshold: it adds uniform noise in [0, 1e-6) to break ties, and keeps a head
global if alpha >= quantile(alpha, s), interpolated linearly; s >= 1 leaves none, s <= 0 all (``duo_attn/utils.py``).

PruLong (arXiv 2506.17121; repository princeton-pli/PruLong, read in the copy qqtang-code/PruLong, commits 41c2511 and
ff22598) uses one file, by default in the checkpoint's folder (``prulong/save_prulong_masks.py``):

- ``masks.tsv``: the mask [L, Hkv] cut at 0.5, 1.0 or 0.0. ``masks_sp<s>.tsv``: 1.0 for the int((1 - s) L Hkv) highest
  masks, ties broken by a seeded draw (``prulong/training/modeling_flash_llama.py``). Lines end in CR LF.
- ``config.json`` of that checkpoint has ``sink_size`` and ``local_window_size`` (defaults 128 and 1024).

PruLong's evaluation reads the files of both projects, takes sinks and window from flags, and cuts at DuoAttention's
quantile even where the file already holds a mask (``eval/model_utils.py``).

We cut at the same quantile, without the noise: among equal scores the earlier layer and head stays global, as in every
strategy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spkv_nas.artifacts import grid, head_scores, kinds
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base import arrays, errors, files, hub, limits, version
from spkv_nas.base.replace import new_folder, replacing
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.proposal.strategies import densest

DUO_ATTENTION = "duo-attention"
PRULONG = "prulong"
# Files in a DuoAttention folder
TSV_NAME = "full_attention_heads.tsv"
CONFIG_NAME = "config.json"
# Keys that are read from a ``config.json``, with the smallest value of each
_SIZE_KEYS = {
    "sink_size": 0,
    "recent_size": 1,
    "local_window_size": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
}
_CREATED_BY = f"spkv-nas {version.__version__}"
# Clip values this far outside [0, 1]: one training step at DuoAttention's default learning rate
_OVERSHOOT = 0.01


@dataclass(frozen=True, eq=False)
class ForeignScores:
    """A score per KV head, higher for heads that need global attention."""

    values: arrays.Float  # scores [L, Hkv] in [0, 1], NaN beyond the heads of a layer
    origin: str  # "duo-attention" (alpha), "prulong" (mask), or "density"
    source: str  # path of the file as given by the user
    # local attention window in tokens, the query's own key included; None if no file gives it
    window: int | None = None
    # number of first keys that a local head sees besides its window; None if no file gives it
    sink_size: int | None = None

    @property
    def is_mask(self) -> bool:
        """Return true if every value is 0 or 1, so that the global heads are already chosen."""
        return bool(np.isin(self.values[np.isfinite(self.values)], (0.0, 1.0)).all())

    @property
    def heads_per_layer(self) -> tuple[int, ...]:
        """Return the number of KV heads of every layer."""
        return tuple(np.isfinite(self.values).sum(1).tolist())

    def table(self, name: str) -> head_scores.HeadScores:
        """Return the scores as a head-score table for ``propose``; its record has their origin and file."""
        return head_scores.HeadScores.from_array(
            self.values,
            name=name,
            kind=kinds.SHARE,
            window=self.window,
            signal=self.origin,
            source=self.source,
            sinks=self.sink_size or 0,
        )

    def choose(
        self,
        *,
        budget: int | str | None = None,
        sparsity: float | None = None,
        threshold: float | None = None,
    ) -> arrays.Mask:
        """Return a bool mask [L, Hkv], true for global heads; without options, the mask that the scores already are.

        Args:
            budget: number of highest-scoring heads to keep global, or a share such as "25%".
            sparsity: in [0, 1]; heads below this quantile of the scores become local, as in DuoAttention and PruLong.
            threshold: in [0, 1]; heads with at least this score are global.

        Raises ``UserError``: several options are set, one is out of range, or none is although the scores are no mask.
        """
        # Check the options
        options = {"budget": budget, "sparsity": sparsity, "threshold": threshold}
        set_options = [f"--{name}" for name, value in options.items() if value is not None]
        if len(set_options) > 1:
            raise errors.UserError(
                f"give only one of {', '.join(set_options)}: each of them determines which heads "
                "are global"
            )
        for name, value in (("sparsity", sparsity), ("threshold", threshold)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise errors.UserError(f"--{name} must lie in [0, 1]; found {value:g}")
        # Choose the heads
        num_heads = sum(self.heads_per_layer)
        if budget is not None:
            return densest(self.values, parse_budget(budget, num_heads))
        if sparsity is not None:
            return densest(self.values, num_heads - num_local(sparsity, num_heads))
        if threshold is None:
            if not self.is_mask:
                raise errors.UserError(
                    f"{self.source} holds scores between 0 and 1, "
                    "so the global heads are not chosen yet\n"
                    "give --budget N, --sparsity S or --threshold T (DuoAttention and PruLong use "
                    "a threshold of 0.5)"
                )
            threshold = 0.5
        return np.asarray(self.values >= threshold)


def num_local(sparsity: float, num_heads: int) -> int:
    """Return how many of ``num_heads`` distinct scores lie below their quantile at ``sparsity`` in [0, 1]."""
    if sparsity in (0.0, 1.0):
        return int(sparsity * num_heads)
    # A head exactly on the quantile stays global
    return math.ceil(sparsity * (num_heads - 1) - 1e-9)


def read_scores(path: Path) -> ForeignScores:
    """Read scores from a DuoAttention folder, a ``.tsv`` of either project, or a density table (``.csv``).

    Window and sinks come from the ``config.json`` next to a ``.tsv``. A ``.tsv`` is DuoAttention's if that config has
    ``recent_size`` or the file name starts with ``full_attention_heads``, else PruLong's. Raises ``UserError``: the
    file is invalid (names file, line and column), or its grid differs from the config's.
    """
    if path.suffix == ".csv":
        table = head_scores.HeadScores.read(path)
        return ForeignScores(
            table.values.clip(0.0),
            origin="density",
            source=str(path),
            window=table.window,
            sink_size=table.sinks,
        )
    # Read the values
    file = path / TSV_NAME if files.is_folder(path) else path
    if file.suffix != ".tsv":
        raise errors.UserError(
            f"{path} is neither a layout (.yaml), nor head scores (.tsv, .csv), "
            f"nor a folder with {TSV_NAME}"
        )
    values = _read_values(file)
    config = _read_config(file.parent / CONFIG_NAME)
    # Compare their grid with the model's, if the config gives it
    heads_per_layer = (len(values[0]),) * len(values)
    num_layers = config.get("num_hidden_layers", len(values))
    num_heads = config.get("num_key_value_heads", len(values[0]))
    grid.check_grid(
        f"the file of head scores {file}",
        heads_per_layer,
        f"{CONFIG_NAME} in the same folder",
        (num_heads,) * num_layers,
        "the file needs one value per KV head, not per query head",
    )
    # Identify the project and its sizes
    is_duo_attention = "recent_size" in config or file.name.startswith("full_attention_heads")
    return ForeignScores(
        values,
        origin=DUO_ATTENTION if is_duo_attention else PRULONG,
        source=str(path),
        window=config.get("recent_size", config.get("local_window_size")),
        sink_size=config.get("sink_size"),
    )


def read_score_table(path: Path) -> head_scores.HeadScores:
    """Read a ``.tsv`` as a table named after the file, or after the folder of a ``full_attention_heads`` file."""
    is_named_by_folder = path.stem.startswith("full_attention_heads")
    name = path.resolve().parent.name if is_named_by_folder else path.stem
    return read_scores(path).table(name)


def _read_values(file: Path) -> arrays.Float:
    """Read values [L, Hkv] in [0, 1]. Raises ``UserError`` that names line and column."""
    where = f"head scores {file}"
    text = files.read_text(file, "head scores")
    # Split the lines into cells, leaving out comments
    lines = []
    for number, text_line in enumerate(text.split("\n"), 1):
        if text_line.strip() and not text_line.startswith("#"):
            lines.append((number, text_line.split("\t")))
    if not lines:
        raise errors.UserError(
            f"{where}: the file is empty; expected one line per layer with one value per KV head"
        )
    # Check that all lines have equally many values
    _, first_cells = lines[0]
    for number, cells in lines:
        if len(cells) != len(first_cells):
            raise errors.UserError(
                f"{where}, line {number}: expected {len(first_cells)} values, "
                f"as in the first line; found {len(cells)}"
            )
    values = []
    for number, cells in lines:
        row = [
            _number(cell, f"{where}, line {number}, column {column}")
            for column, cell in enumerate(cells, 1)
        ]
        values.append(row)
    return np.array(values)


def _number(cell: str, where: str) -> float:
    """Parse one value and clip it to [0, 1]. Raises ``UserError`` if it is no number or too far outside."""
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not -_OVERSHOOT <= value <= 1.0 + _OVERSHOOT:
        shown = cell if len(cell) <= 20 else cell[:20] + "..."
        raise errors.UserError(
            f"{where}: expected tab-separated numbers in [0, 1]; found {shown!r}"
        )
    return min(max(value, 0.0), 1.0)


def _read_config(file: Path) -> dict[str, int]:
    """Read the sizes in a ``config.json``, without null ones; empty if there is no file."""
    if not files.is_file(file):
        return {}
    data = files.read_json(file, "config")
    sizes = {key: data[key] for key in _SIZE_KEYS if data.get(key) is not None}
    for key, value in sizes.items():
        if type(value) is not int or not _SIZE_KEYS[key] <= value <= limits.MAX_WINDOW:
            shown = errors.shortened(repr(value), 40)
            raise errors.UserError(
                f"config {file}: '{key}' must be a whole number of at least {_SIZE_KEYS[key]}; "
                f"found {shown}"
            )
    return sizes


def convert(
    source: Path,
    target: Path,
    *,
    budget: int | str | None = None,
    sparsity: float | None = None,
    threshold: float | None = None,
    window: int | None = None,
    sinks: int | None = None,
) -> list[str]:
    """Write a layout or head scores in another format; return what was written, and what it cannot hold.

    Scores stay scores when converted to DuoAttention, unless an option of ``ForeignScores.choose`` selects heads. The
    name of ``target`` decides the format: ``.yaml`` a layout, ``.tsv`` a PruLong mask, ``full_attention_heads.tsv`` or
    a folder DuoAttention's two files. ``window`` and ``sinks`` precede the source's. Raises ``UserError``: a format is
    unknown or damaged, the target exists, or the options do not fit the source.
    """
    # Check target and options
    target_files = _target_files(target)
    options = {"budget": budget, "sparsity": sparsity, "threshold": threshold}
    chosen = {name: value for name, value in options.items() if value is not None}
    if window is not None and window < 1:
        raise errors.UserError(
            f"--window is {window}; it must be at least 1, because it includes the query's own key"
        )
    # Convert a layout, whose heads are chosen
    if hub.is_on_hub(source) or _is_layout(source):
        layout = Layout.read(source)
        if chosen:
            raise errors.UserError(
                f"{source} is a layout, whose global heads are already chosen: "
                f"--{next(iter(chosen))} applies only to scores"
            )
        layout = _resized(layout, target, window, sinks)
        return _write(target_files, layout, source=f"{layout.strategy} {layout.hash}")
    # Convert scores, which DuoAttention's files hold as they are
    scores, notes = _with_sizes(read_scores(source), window, sinks)
    if target_files[0].name == TSV_NAME and not chosen:
        _check_even(scores.heads_per_layer)
        return [*notes, _write_duo_attention(target_files, scores)]
    layout, tie_notes = _chosen_layout(scores, chosen)
    return [*notes, *tie_notes, *_write(target_files, layout, source=scores.source)]


def _resized(layout: Layout, target: Path, window: int | None, sinks: int | None) -> Layout:
    """Return a layout with another window or other sinks; None keeps those of the layout.

    Raises ``UserError`` for a layout of several windows, with a window for all heads or another target than a layout.
    """
    if window is not None or not _is_layout(target):
        layout.check_one_window(
            "--window, and the formats of DuoAttention and PruLong, have one for all heads"
        )
    return replace(
        layout, window=window or layout.window, sinks=layout.sinks if sinks is None else sinks
    )


def _with_sizes(
    scores: ForeignScores, window: int | None, sinks: int | None
) -> tuple[ForeignScores, list[str]]:
    """Fill in missing window and sinks of the scores; return them with a note on assumed values."""
    window = window or scores.window
    sinks = scores.sink_size if sinks is None else sinks
    assumptions = []
    if window is None:
        assumptions.append(f"a window of {DEFAULT_WINDOW} (change it with --window W)")
    if sinks is None:
        assumptions.append("no sink tokens (change it with --sinks N)")
    scores = replace(scores, window=window or DEFAULT_WINDOW, sink_size=sinks or 0)
    if not assumptions:
        return scores, []
    note = f"{scores.source} does not record all sizes: assumed {' and '.join(assumptions)}"
    return scores, [note]


def _chosen_layout(scores: ForeignScores, chosen: dict[str, Any]) -> tuple[Layout, list[str]]:
    """Return the layout of the chosen heads, with a note if the cut falls among equal scores."""
    assert scores.window is not None
    mask = scores.choose(**chosen)
    layout = Layout.from_mask(
        mask,
        window=scores.window,
        strategy=scores.origin,
        provenance={
            "source": scores.source,
            **chosen,
            "budget": int(mask.sum()),
            "created_by": _CREATED_BY,
        },
        sinks=scores.sink_size or 0,
        heads_per_layer=scores.heads_per_layer,
    )
    if not mask.any():
        return layout, []
    # Mention ties at the cut
    lowest = scores.values[mask].min()
    tied = scores.values == lowest
    if not (tied & ~mask).any():
        return layout, []
    return layout, [
        f"{tied.sum()} heads are tied at a score of {lowest:g}, and {(tied & mask).sum()} of them "
        "are global: those of the lowest layers, then of the lowest head numbers"
    ]


def _target_files(target: Path) -> list[Path]:
    """Return the files that a conversion writes. Raises ``UserError`` if one exists or the format is unknown."""
    # Recognise the format by the name
    if _is_layout(target) or (target.suffix == ".tsv" and target.name != TSV_NAME):
        target_files = [target]
    elif target.name == TSV_NAME:
        target_files = [target, target.parent / CONFIG_NAME]
    elif target.suffix[1:].isalpha() and not target.is_dir():
        raise errors.UserError(
            f"{target}: unknown output format; name a .yaml file (layout), "
            "a .tsv file (PruLong mask) or a folder (DuoAttention)"
        )
    else:
        target_files = [target / TSV_NAME, target / CONFIG_NAME]
    _check_absent(target_files)
    return target_files


def _check_absent(target_files: Sequence[Path]) -> None:
    """Check that no file is there. Raises ``UserError`` otherwise."""
    for file in target_files:
        if file.exists():
            raise errors.UserError(f"{file} already exists: choose another name")


def _write(target_files: Sequence[Path], layout: Layout, *, source: str) -> list[str]:
    """Write a layout in the format of the target; return messages. DuoAttention's config names the ``source``."""
    target = target_files[0]
    if _is_layout(target):
        layout.write(target)
        heads = f"{layout.num_global} of {layout.num_heads} KV heads global"
        return [f"{target}: {heads}, {layout.reach}, hash {layout.hash}"]
    _check_even(layout.heads_per_layer)
    if target.name != TSV_NAME:
        return _write_prulong(target, layout)
    scores = ForeignScores(
        layout.global_mask.astype(np.float64),
        origin=layout.strategy,
        source=source,
        window=layout.window,
        sink_size=layout.sinks,
    )
    return [_write_duo_attention(target_files, scores)]


def _check_even(heads_per_layer: Sequence[int]) -> None:
    """Check that all layers have as many KV heads. Raises ``UserError`` otherwise."""
    if len(set(heads_per_layer)) > 1:
        raise errors.UserError(
            "the formats of DuoAttention and PruLong have as many KV heads in every layer"
        )


def _write_duo_attention(target_files: Sequence[Path], scores: ForeignScores) -> str:
    """Write DuoAttention's two files atomically; return a message."""
    config = {
        "sink_size": scores.sink_size,
        "recent_size": scores.window,
        "source": scores.source,
        "created_by": _CREATED_BY,
    }
    # Write both files or neither, and refuse those that appear meanwhile like those that were there before
    folder = target_files[0].parent
    writing = replacing(folder) if folder.is_dir() else new_folder(folder, replaces=False)
    with writing as new:
        files.write_json(new / CONFIG_NAME, config)
        files.write_atomic(new / TSV_NAME, _lines(scores.values, "{:.18e}"))
        _check_absent(target_files)
    content = "scores"
    if scores.is_mask:
        content = f"{int(scores.values.sum())} of {scores.values.size} KV heads global"
    sinks = f"{scores.sink_size} sink token{'' if scores.sink_size == 1 else 's'}"
    return f"{target_files[0]}: {content}, {sinks}, window {scores.window}"


def _write_prulong(target: Path, layout: Layout) -> list[str]:
    """Write a PruLong mask; return messages."""
    files.write_atomic(target, _lines(layout.global_mask.astype(np.float64), "{:.1f}"))
    return [
        f"{target}: {layout.num_global} of {layout.num_heads} KV heads global",
        "a PruLong mask does not record window and sinks: "
        f"evaluate with --duoattn_sliding {layout.window} --duoattn_sink {layout.sinks}",
    ]


def _lines(values: arrays.Float, number: str) -> str:
    """Format values [L, Hkv] as tab-separated lines, one per layer."""
    lines = ["\t".join(number.format(value) for value in row) for row in values]
    return "".join(f"{line}\n" for line in lines)


def _is_layout(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")
