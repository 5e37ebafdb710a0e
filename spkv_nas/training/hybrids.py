"""Train-hybrid: retrain every layout from the dense checkpoint and compare, as the paper's table does.

SP-KV paper, figure "Architecture search over sparse global-head layouts": density, coverage, NLL, and the change of
NLL against full attention. Every branch sees the same data in the same order; differences are paired by document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

from spkv_nas.artifacts.comparison import COLUMNS, FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.distributed import on_main
from spkv_nas.base.files import sha256_file, write_atomic
from spkv_nas.base.version import environment
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.evaluation.ranking import rank_correlation
from spkv_nas.evaluation.zero_shot import cache_folder, zero_shot
from spkv_nas.model.checkpoint import MANIFEST, load, resolve
from spkv_nas.proposal.coverage import coverage
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run import Branch, Corpus, load_corpus, start, train_branch, train_dense


def train_hybrids(
    recipe: Recipe,
    layouts: dict[str, Layout],
    table: DensityTable,
    workspace: Workspace,
    *,
    base: Path,
    num_seeds: int = 1,
    device: str | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> pd.DataFrame:
    """Train full attention, SP-KV and every layout; write ``reports/<name>/comparison.csv`` after each run.

    A finished run is not run again: its folder is named by everything that decides its result.

    Args:
        table: densities that coverage is computed with; its name is the report's.
        base: folder that the recipe's relative paths start from.
        num_seeds: repetitions with another data order (and other initial predictors).
        announce: told what starts, one line each.

    Returns:
        The comparison, columns ``COLUMNS``; full attention first, then by NLL.
    """
    start(recipe, device)
    workspace.check_writable()
    covered = {name: coverage(table, layout) for name, layout in layouts.items()}  # refuses a layout that does not fit
    runs = workspace.run_dir(recipe.name)
    corpus = load_corpus(recipe, base, runs)
    dense = dense_checkpoint(recipe, corpus, runs, device=device)
    announce("zero-shot scores on the dense checkpoint")
    untrained = on_main(partial(zero_shot_scores, recipe, layouts, corpus, dense, runs / "zero-shot", device=device))
    variants: dict[str, str | Layout] = {FULL_ATTENTION: FULL_ATTENTION, SP_KV: SP_KV, **layouts}
    finished: dict[str, list[Branch]] = {name: [] for name in variants}
    for seed in range(recipe.seed, recipe.seed + num_seeds):
        for number, (name, variant) in enumerate(variants.items(), 1):
            folder = runs / "branches" / branch_key(recipe, dense, variant, seed)
            announce(f"{name} ({number} of {len(variants)}, seed {seed})")
            finished[name].append(train_branch(recipe, corpus, dense, folder, variant, seed=seed, device=device))
            rows = comparison(finished, layouts, covered, untrained, recipe)
            on_main(partial(write_comparison, workspace.report_dir(table.name), rows, recipe, table))
    return rows


def dense_checkpoint(recipe: Recipe, corpus: Corpus, runs: Path, *, device: str | None = None) -> Path:
    """The checkpoint that branches start from: the recipe's ``model.path``, or its dense run (trained if needed)."""
    if recipe.model.path is not None:
        return resolve(recipe.model.path)
    key = recipe.content_hash("model", "tokenizer", "data", "dense", "seed", "precision")
    return train_dense(recipe, corpus, runs / f"dense-{key}", device=device)


def branch_key(recipe: Recipe, dense: Path, variant: str | Layout, seed: int) -> str:
    """Name of a branch's folder: strategy or layout, and a hash of all that decides the result."""
    sections = ["branch", "data", "evaluation", "precision"]
    if variant == SP_KV:
        sections.append("gates")
    parts: list[Any] = [recipe.content_hash(*sections), seed]
    manifest = dense / MANIFEST
    parts.append(sha256_file(manifest) if manifest.is_file() else str(dense))
    name = variant if isinstance(variant, str) else f"{variant.strategy}-{variant.content_hash}"
    return f"{name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}-seed{seed}"


def zero_shot_scores(
    recipe: Recipe, layouts: dict[str, Layout], corpus: Corpus, dense: Path, cache: Path, *, device: str | None = None
) -> dict[str, DocumentNLL]:
    """Held-out NLL of the dense checkpoint with each layout on it before any training, and of full attention."""
    model, _ = load(dense)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    scores = zero_shot(
        model,
        [None, *layouts.values()],
        corpus.heldout,
        batch_size=recipe.evaluation.batch_size,
        cache=cache_folder(cache, model, dense, corpus.heldout),
    )
    return dict(zip([FULL_ATTENTION, *layouts], scores, strict=True))


def comparison(
    finished: dict[str, list[Branch]],
    layouts: dict[str, Layout],
    covered: dict[str, float],
    untrained: dict[str, DocumentNLL],
    recipe: Recipe,
) -> pd.DataFrame:
    """The table of what has finished so far; empty until full attention has. ``untrained``: the zero-shot scores."""
    if not finished[FULL_ATTENTION]:
        return pd.DataFrame(columns=list(COLUMNS))
    rows = []
    for name, branches in finished.items():
        if not branches:
            continue
        count = min(len(branches), len(finished[FULL_ATTENTION]))
        nll, baseline = (_mean([b.nll for b in some[:count]]) for some in (branches, finished[FULL_ATTENTION]))
        change = paired_difference(nll, baseline)
        layout = layouts.get(name)
        density = layout.num_global / layout.num_heads if layout is not None else branches[0].density
        rows.append(
            {
                "strategy": name,
                "density_percent": 100.0 * (1.0 if density is None else density),
                "coverage_percent": 100.0 * covered.get(name, 1.0),
                "nll": nll.mean,
                "delta_nll_percent": np.nan if name == FULL_ATTENTION else change.percent,
                "delta_nll_standard_error": np.nan if name == FULL_ATTENTION else change.standard_error,
                "num_global": layout.num_global if layout is not None else None,
                "num_seeds": count,
                "steps": recipe.branch.steps,
                **_zero_shot_columns(name, untrained),
                "note": "",
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _zero_shot_columns(name: str, untrained: dict[str, DocumentNLL]) -> dict[str, float]:
    score = untrained.get(name)  # none of SP-KV, whose predictors come with training
    if score is None or name == FULL_ATTENTION:
        return {"zero_shot_nll": np.nan if score is None else score.mean, "zero_shot_delta_percent": np.nan}
    change = paired_difference(score, untrained[FULL_ATTENTION])
    return {"zero_shot_nll": score.mean, "zero_shot_delta_percent": change.percent}


def rank_correlations(rows: pd.DataFrame) -> dict[str, dict[str, Any] | None]:
    """How well coverage (-1: perfectly) and zero-shot NLL (+1) order the layouts by their ΔNLL after retraining."""
    layouts = rows[rows["num_global"].notna()]
    return {
        measure: rank_correlation(layouts[column], layouts["delta_nll_percent"])
        for measure, column in (("coverage", "coverage_percent"), ("zero-shot NLL", "zero_shot_delta_percent"))
    }


def write_comparison(folder: Path, rows: pd.DataFrame, recipe: Recipe, table: DensityTable) -> None:
    """Write ``comparison.csv`` and ``comparison.yaml`` (rank correlations, recipe, versions)."""
    write_atomic(folder / "comparison.csv", rows.to_csv(index=False, float_format="%.6g"))
    correlations = rank_correlations(rows)
    summary = {
        "probe": table.name,
        "rank_correlation": correlations["coverage"],
        "zero_shot_rank_correlation": correlations["zero-shot NLL"],
        "recipe": recipe.model_dump(mode="json"),
        "environment": environment(),
    }
    write_atomic(folder / "comparison.yaml", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True))


def _mean(parts: list[DocumentNLL]) -> DocumentNLL:
    """Mean over seeds, document by document."""
    return DocumentNLL(np.mean([part.total for part in parts], axis=0), parts[0].num_tokens)
