"""Convert layouts and head scores to and from the formats of DuoAttention and PruLong (``foreign_formats``)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base import arrays, errors, hub, version
from spkv_nas.base.files import write_atomic, write_json
from spkv_nas.base.replace import new_folder, replacing
from spkv_nas.proposal.foreign_formats import CONFIG_NAME, TSV_NAME, ForeignScores, read_scores

_CREATED_BY = f"spkv-nas {version.__version__}"


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
    files = _target_files(target)
    options = {"budget": budget, "sparsity": sparsity, "threshold": threshold}
    chosen = {name: value for name, value in options.items() if value is not None}
    if window is not None and window < 1:
        raise errors.UserError(f"--window is {window}; it must be at least 1, because it includes the query's own key")
    # Read the source
    layout = Layout.read(source) if hub.is_on_hub(source) or _is_layout(source) else None
    if layout is None:
        scores, notes = _with_sizes(read_scores(source), window, sinks)
    elif chosen:
        raise errors.UserError(
            f"{source} is a layout, whose global heads are already chosen: "
            f"--{next(iter(chosen))} applies only to scores"
        )
    else:
        layout, notes = _resized(layout, target, window, sinks), []
        mask = layout.global_mask.astype(np.float64)
        origin = f"{layout.strategy} {layout.hash}"
        scores = ForeignScores(mask, layout.strategy, origin, layout.window, layout.sinks)
    # Select heads if the target needs a mask
    to_duo_attention = files[0].name == TSV_NAME
    if layout is None and (chosen or not to_duo_attention):
        layout, tie_notes = _chosen_layout(scores, chosen)
        scores, notes = replace(scores, values=layout.global_mask.astype(np.float64)), notes + tie_notes
    # Write the target
    if not _is_layout(target) and len({*(scores.heads_per_layer if layout is None else layout.heads_per_layer)}) > 1:
        raise errors.UserError("the formats of DuoAttention and PruLong have as many KV heads in every layer")
    if to_duo_attention:
        return [*notes, _write_duo_attention(files, scores)]
    assert layout is not None
    return notes + (_write_layout if _is_layout(target) else _write_prulong)(target, layout)


def _resized(layout: Layout, target: Path, window: int | None, sinks: int | None) -> Layout:
    """Return a layout with another window or other sinks; None keeps those of the layout.

    Raises ``UserError`` for a layout of several windows, with a window for all heads or another target than a layout.
    """
    if window is not None or not _is_layout(target):
        layout.check_one_window("--window, and the formats of DuoAttention and PruLong, have one for all heads")
    return replace(layout, window=window or layout.window, sinks=layout.sinks if sinks is None else sinks)


def _with_sizes(scores: ForeignScores, window: int | None, sinks: int | None) -> tuple[ForeignScores, list[str]]:
    """Fill in missing window and sinks of the scores; return them with a note on assumed values."""
    window = window or scores.window
    sinks = scores.sink_size if sinks is None else sinks
    assumptions = []
    if window is None:
        assumptions.append(f"a window of {DEFAULT_WINDOW} (change it with --window W)")
    if sinks is None:
        assumptions.append("no sink tokens (change it with --sinks N)")
    notes = [f"{scores.source} does not record all sizes: assumed {' and '.join(assumptions)}"] if assumptions else []
    return replace(scores, window=window or DEFAULT_WINDOW, sink_size=sinks or 0), notes


def _chosen_layout(scores: ForeignScores, chosen: dict[str, Any]) -> tuple[Layout, list[str]]:
    """Return the layout of the chosen heads, with a note if the cut falls among equal scores."""
    assert scores.window is not None
    mask = scores.choose(**chosen)
    provenance = {"source": scores.source, **chosen, "budget": int(mask.sum()), "created_by": _CREATED_BY}
    sizes: dict[str, Any] = {"sinks": scores.sink_size or 0, "heads_per_layer": scores.heads_per_layer}
    layout = Layout.from_mask(mask, window=scores.window, strategy=scores.origin, provenance=provenance, **sizes)
    # Mention ties at the cut
    others = scores.values[~mask & np.isfinite(scores.values)]
    if not others.size or not mask.any() or scores.values[mask].min() > others.max():
        return layout, []
    tied = scores.values == scores.values[mask].min()
    return layout, [
        f"{tied.sum()} heads are tied at a score of {scores.values[mask].min():g}, and {(tied & mask).sum()} of them "
        "are global: those of the lowest layers, then of the lowest head numbers"
    ]


def _target_files(target: Path) -> list[Path]:
    """Return the files that a conversion writes. Raises ``UserError`` if one exists or the format is unknown."""
    # Recognise the format by the name
    if _is_layout(target) or (target.suffix == ".tsv" and target.name != TSV_NAME):
        files = [target]
    elif target.name == TSV_NAME:
        files = [target, target.parent / CONFIG_NAME]
    elif target.suffix[1:].isalpha() and not target.is_dir():
        raise errors.UserError(
            f"{target}: unknown output format; name a .yaml file (layout), a .tsv file (PruLong mask) or a folder "
            "(DuoAttention)"
        )
    else:
        files = [target / TSV_NAME, target / CONFIG_NAME]
    for file in files:
        if file.exists():
            raise errors.UserError(f"{file} already exists: choose another name")
    return files


def _write_duo_attention(files: Sequence[Path], scores: ForeignScores) -> str:
    """Write DuoAttention's two files atomically; return a message."""
    sizes = {"sink_size": scores.sink_size, "recent_size": scores.window}
    config = {**sizes, "source": scores.source, "created_by": _CREATED_BY}
    folder = files[0].parent
    with (replacing if folder.is_dir() else new_folder)(folder) as new:  # both files or neither
        write_json(new / CONFIG_NAME, config)
        write_atomic(new / TSV_NAME, _lines(scores.values, "{:.18e}"))
    content = f"{int(scores.values.sum())} of {scores.values.size} KV heads global" if scores.is_mask else "scores"
    sinks = f"{scores.sink_size} sink token{'' if scores.sink_size == 1 else 's'}"
    return f"{files[0]}: {content}, {sinks}, window {scores.window}"


def _write_layout(target: Path, layout: Layout) -> list[str]:
    layout.write(target)
    return [f"{target}: {layout.num_global} of {layout.num_heads} KV heads global, {layout.reach}, hash {layout.hash}"]


def _write_prulong(target: Path, layout: Layout) -> list[str]:
    """Write a PruLong mask; return messages."""
    write_atomic(target, _lines(layout.global_mask.astype(np.float64), "{:.1f}"))
    return [
        f"{target}: {layout.num_global} of {layout.num_heads} KV heads global",
        "a PruLong mask does not record window and sinks: "
        f"evaluate with --duoattn_sliding {layout.window} --duoattn_sink {layout.sinks}",
    ]


def _lines(values: arrays.Float, number: str) -> str:
    """Format values [L, Hkv] as tab-separated lines, one per layer."""
    return "".join("\t".join(number.format(value) for value in row) + "\n" for row in values)


def _is_layout(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")
