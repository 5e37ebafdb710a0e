"""Candidates, a dense model and a text for tests of ``verdict``, and a check that it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.checkpoint import save
from spkv_nas.stages.options.verdict import VerdictOptions
from spkv_nas.stages.verdict import VerdictResult
from spkv_nas.stages.verdict import run as verdict


def decisive_model() -> PreTrainedModel:
    """Make a model whose predictions are not nearly uniform, and that never ends a text by itself."""
    model = tiny_model(vocab_size=300)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = 299
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(4.0)
    return model


def write_folder(tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a dense model, a text of 60 documents, and layouts to the current folder."""
    save(decisive_model(), tokenizer, Path("dense"))
    Path("text").mkdir()
    for number in range(60):
        words = " ".join(f"word{(number * word) % 17} returns" for word in range(20))
        Path("text", f"{number}.txt").write_text(f"document {number}: {words}\n")
    Layout(("GG",) * 4, window=4, strategy="full").write("full.yaml")
    Layout(("LL", "LL", "LL", "GG"), window=4, strategy="three-to-one").write("three-to-one.yaml")


def run(*candidates: str, **options: Any) -> VerdictResult:
    options = {"model": "dense", "data": ["text"], "context": "32"} | options
    return verdict(VerdictOptions(candidates=[*candidates], **options)).value


def check_resumes(
    rounds: Any, monkeypatch: pytest.MonkeyPatch, *candidates: str, **options: Any
) -> None:
    """Kill a verdict at every call of ``measure`` and ``prepare`` of its rounds in turn, until it is done."""
    whole = run(*candidates, workspace=Path("whole"), **options)
    calls: list[int] = []

    def killing(method: Any) -> Any:
        def killed(self: Any, *arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return method(self, *arguments)

        return killed

    for name in ("measure_all", "prepare"):
        monkeypatch.setattr(rounds, name, killing(getattr(rounds, name)))
    num_killed = 0
    while True:
        calls.clear()
        try:
            resumed = run(*candidates, workspace=Path("killed"), **options)
        except KeyboardInterrupt:
            num_killed += 1
        else:
            break
    assert num_killed > 1
    assert (resumed.folder / "verdict.csv").read_bytes() == (
        whole.folder / "verdict.csv"
    ).read_bytes()
    calls.clear()
    run(*candidates, workspace=Path("killed"), **options)
    assert not calls, "finished rounds are measured again"
