"""Layouts and head scores from one form to another: ours, DuoAttention's, PruLong's (``foreign_formats``).

``hash`` and strategy of a layout go into DuoAttention's ``config.json``, which has room for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import write_atomic, write_json
from spkv_nas.base.replace import new_folder, replacing
from spkv_nas.base.version import __version__
from spkv_nas.proposal.foreign_formats import CONFIG_NAME, TSV_NAME, ForeignScores, read_scores

_CREATED_BY = f"spkv-nas {__version__}"


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
    ``ForeignScores.choose`` cuts them. ``window`` replaces that of the source.

    Raises:
        UserError: a form is unknown or damaged, the target exists, or the options do not fit the source.
    """
    files = _target_files(target)
    options = {"budget": budget, "sparsity": sparsity, "threshold": threshold}
    chosen = {name: value for name, value in options.items() if value is not None}
    if window is not None and window < 1:
        raise UserError(f"--window is {window}; it counts the query's own key: at least 1")
    layout = Layout.read(source) if _is_layout(source) else None
    if layout is None:
        scores, notes = _with_sizes(read_scores(source), window)
    elif chosen:
        raise UserError(f"{source} is a layout, which has chosen its heads: --{next(iter(chosen))} is for scores")
    else:
        layout, notes = replace(layout, window=window or layout.window), []
        mask = layout.global_mask.astype(np.float64)
        scores = ForeignScores(mask, layout.strategy, f"{layout.strategy} {layout.hash}", layout.window, sink_size=0)
    duo = files[0].name == TSV_NAME
    if layout is None and (chosen or not duo):
        layout, ties = _chosen_layout(scores, chosen)
        scores, notes = replace(scores, values=layout.global_mask.astype(np.float64)), notes + ties
    if duo:
        return [*notes, _write_duo_attention(files, scores)]
    assert layout is not None
    return notes + (_write_layout if _is_layout(target) else _write_prulong)(target, layout, scores.sink_size or 0)


def _with_sizes(scores: ForeignScores, window: int | None) -> tuple[ForeignScores, list[str]]:
    """The scores with a window (the one given, their own, or the default) and sinks, and a sentence on a guess."""
    window = window or scores.window
    guesses = []
    if window is None:
        guesses.append(f"the window as {DEFAULT_WINDOW} (--window W sets it)")
    if scores.sink_size is None:
        guesses.append("the sinks as none")
    notes = [f"{scores.source} comes without sizes: took {' and '.join(guesses)}"] if guesses else []
    return replace(scores, window=window or DEFAULT_WINDOW, sink_size=scores.sink_size or 0), notes


def _chosen_layout(scores: ForeignScores, chosen: dict[str, Any]) -> tuple[Layout, list[str]]:
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
    if _is_layout(target) or (target.suffix == ".tsv" and target.name != TSV_NAME):
        files = [target]
    elif target.name == TSV_NAME:
        files = [target, target.parent / CONFIG_NAME]
    elif target.suffix[1:].isalpha() and not target.is_dir():
        raise UserError(f"{target}: write .yaml (a layout), .tsv (a PruLong mask), or a folder (DuoAttention)")
    else:
        files = [target / TSV_NAME, target / CONFIG_NAME]
    for file in files:
        if file.exists():
            raise UserError(f"{file} exists: choose another name")
    return files


def _write_duo_attention(files: Sequence[Path], scores: ForeignScores) -> str:
    sizes = {"sink_size": scores.sink_size, "recent_size": scores.window}
    config = {**sizes, "source": scores.source, "created_by": _CREATED_BY}
    folder = files[0].parent
    with (replacing if folder.is_dir() else new_folder)(folder) as new:  # both files, or none of them
        write_json(new / CONFIG_NAME, config)
        write_atomic(new / TSV_NAME, _lines(scores.values, "{:.18e}"))
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


def _is_layout(path: Path) -> bool:
    """Whether the name is a layout file's."""
    return path.suffix in (".yaml", ".yml")
