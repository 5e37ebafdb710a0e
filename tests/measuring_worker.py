"""Run the measurements of ``stages/test_distributed.py``: called by pytest in one process, a script under torchrun."""

from __future__ import annotations

import math
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.distributed import on_main, process_index
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.probing.signals import SIGNALS
from spkv_nas.stages.evaluate.nll import nll, sweep
from spkv_nas.stages.options.evaluate.nll import NLLOptions
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.score import ScoreOptions
from spkv_nas.stages.probe import probe
from spkv_nas.stages.score import run as score
from spkv_nas.stages.subject import Subject

SHORT = 48  # tokens of a text of one block: fewer than there are processes

Found = dict[str, pd.DataFrame | np.ndarray]


def measure_all(ground: Path, workspace: Path) -> Found:
    """Run every measurement of the checkpoints ``gated`` and ``dense`` on the text in ``ground``, into a workspace."""
    subject: dict[str, Any] = {
        "workspace": workspace,
        "data": [str(ground / "text")],
        "context": "48",
        "device": "cpu",
    }
    gated, dense = str(ground / "gated"), str(ground / "dense")
    result: Found = {}

    def take(name: str, **options: Any) -> None:
        table = probe(ProbeOptions(name=name, **{"model": dense, **options, **subject}))
        result.update(_arrays(name, table))

    for name, tokens in (("long", None), ("short", SHORT)):
        options: dict[str, Any] = {"model": gated, "max_tokens": tokens, "name": name, **subject}
        at_tau = nll(NLLOptions(**options)).value.evaluation
        result[name] = np.array([at_tau.density, *at_tau.nll.total, *at_tau.nll.num_tokens])
        result[f"{name}, sweep"] = sweep(NLLOptions(**options, taus="0.2,0.5,0.8")).value.rows
    result["score"] = score(
        ScoreOptions(model=dense, layouts=sorted(ground.glob("*.yaml")), **subject)
    ).value.rows
    take("density", model=gated, ablation_tokens=200)
    take("learned", signal="density", steps=6, ablation_tokens=0)
    for signal in SIGNALS.names[1:]:
        some: dict[str, Any] = {"budget": "3"} if signal == "regression" else {}
        some |= {"steps": 4} if signal in ("duo", "head-gates") else {}
        take(signal, signal=signal, window=6, **some)
    take("duo, short", signal="duo", window=6, steps=4, max_tokens=SHORT)
    return result


def _arrays(name: str, table: HeadScores) -> Found:
    """Return all numeric columns of a table."""
    result: Found = {name: table.rows}
    if table.positions is not None:
        result[f"{name}, positions"] = table.positions
    if table.histogram is not None:
        result[f"{name}, histogram"] = table.histogram.counts
    if table.documents is not None:
        result[f"{name}, documents"] = table.documents.kept
    if table.gains is not None:
        result[f"{name}, gains"] = np.stack([table.gains.values, table.gains.standard_error])
    return result


def spoil_one(ground: Path, workspace: Path) -> None:
    """Check that an error of one process is raised by all, in the same words."""
    options = NLLOptions(
        workspace=workspace,
        model=str(ground / "dense"),
        data=[str(ground / "text")],
        context="48",
        device="cpu",
    )
    measured = Subject.of(options, "", "measure").load()
    if process_index() == 1:
        with torch.no_grad():
            measured.model.get_output_embeddings().weight.fill_(math.nan)
    with pytest.raises(UserError, match="of 10 documents is not a finite number"):
        document_nll(measured.model, measured.blocks)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folders = Path(sys.argv[1]), Path(sys.argv[2])
    everything = measure_all(*folders)
    on_main(lambda: (folders[1] / "found.pickle").write_bytes(pickle.dumps(everything)))
    spoil_one(*folders)
    subject = ["--model", "dense", "--data", "text", "--context", "48", "--device", "cpu"]
    os.chdir(folders[0])
    main(["score", "last.yaml", *subject, "--workspace", "printed"])
