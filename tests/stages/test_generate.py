"""Test ``spkv-nas generate``: text equals whole forward passes for every kind of checkpoint, and figures are right."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from helpers import fails, scatter_gates, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.cli import main
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.export import verify_export
from spkv_nas.model.export.export import export
from spkv_nas.model.modes import set_gate_mode
from spkv_nas.model.windows import apply_layout

PROMPT = "the quick brown fox jumps over the lazy dog and the quick fox"


@pytest.fixture
def folder(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, request: pytest.FixtureRequest
) -> Path:
    """Checkpoint of the kind that the test's parameter names; windows of 6."""
    model = tiny_model(vocab_size=300, eos_token_id=None)
    if request.param == "gates":
        attach_gates(model, GateConfig(window=6, hidden_size=16, tau=0.4))
        scatter_gates(model)
    elif request.param == "hybrid":
        apply_layout(model, Layout(("GL", "LL", "LG", "GG"), 6))
    save(model, tiny_tokenizer, tmp_path / request.param)
    if request.param == "exported":
        with pytest.MonkeyPatch.context() as patch:
            # model/export/test_families.py is about it
            patch.setattr(verify_export, "check", lambda *_: 0.0)
            export(Layout(("GG", "LL", "LL", "GG"), 6), tmp_path / "exported", tmp_path / "out")
        return tmp_path / "out"
    return tmp_path / request.param


def every_kind(test: object) -> object:
    return pytest.mark.parametrize(
        "folder", ["gates", "hybrid", "dense", "exported"], indirect=True
    )(test)


def greedy(model: PreTrainedModel, ids: torch.Tensor, number: int) -> torch.Tensor:
    """Return the most likely tokens, one whole forward pass for each."""
    for _ in range(number):
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids[0, -number:]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    main(["generate", *map(str, arguments)])
    shown = capsys.readouterr()
    return shown.out, " ".join(shown.err.split())


@every_kind
def test_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = folder.name
    model, tokenizer = load(folder) if kind != "exported" else (None, load(folder)[1])
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(folder)
    elif kind == "gates":
        set_gate_mode(model, "hard", 0.4)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    text, figures = run(capsys, PROMPT, "--model", folder, "-n", 25)
    assert text == tokenizer.decode(greedy(model, ids, 25), skip_special_tokens=True) + "\n"
    assert f"25 tokens, {re.search(r'[0-9.]+ tokens/s', figures)[0]}" in figures
    assert f"after a prompt of {ids.shape[1]} tokens" in figures
    assert ("at tau 0.4" in figures) == (kind == "gates")
    assert ("density" in figures) == (kind in ("gates", "hybrid"))
    if kind == "hybrid":
        assert "density 50.0 %" in figures
    # Layers, heads, tokens, k and v, head size, bytes
    full = 4 * 2 * (ids.shape[1] + 24) * 2 * 8 * 4 / 1e6
    assert f"full attention {full:.2f} MB" in figures
    if kind == "dense":
        assert f"cache {full:.2f} MB" in figures


@pytest.mark.parametrize("folder", ["gates"], indirect=True)
class TestPrompt:
    def test_from_a_file_or_standard_input(
        self,
        folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        expected, _ = run(capsys, PROMPT, "--model", folder, "-n", 8)
        (tmp_path / "prompt.txt").write_text(PROMPT)
        assert (
            run(capsys, "--file", tmp_path / "prompt.txt", "--model", folder, "-n", 8)[0]
            == expected
        )
        monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
        assert run(capsys, "-f", "-", "--model", folder, "-n", 8)[0] == expected

    def test_a_higher_threshold_keeps_less(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = [
            run(capsys, PROMPT * 2, "--model", folder, "-n", 8, "--tau", tau)[1]
            for tau in (0.0, 0.5, 0.9)
        ]
        densities = [float(re.search(r"density ([0-9.]+) %", text)[1]) for text in shown]
        assert densities[0] == 100.0 > densities[1] > densities[2]

    def test_samples_repeat_with_their_seed(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = (PROMPT, "--model", folder, "-n", 20, "--temperature", 1.5, "--seed")
        texts = [run(capsys, *options, seed)[0] for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    def test_a_prompt_within_the_window(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert (
            "density unknown (no key left the window) at tau 0.4"
            in run(capsys, "a", "--model", folder, "-n", 2)[1]
        )


@pytest.mark.parametrize("folder", ["dense"], indirect=True)
class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "no prompt: give one as an argument, or a file with --file"),
            ([PROMPT, "--file", "x"], "not both"),
            ([""], "the prompt is empty"),
            (["a\udce9"], "the prompt is not UTF-8 text"),
            (["--file", "nowhere.txt"], "nowhere.txt"),
            ([PROMPT, "--tau", "1.5"], "--tau must lie in [0, 1]; found 1.5"),
            ([PROMPT, "--tau", "0.5"], "no gates, so tau has no effect"),
        ],
    )
    def test_bad_input(
        self, folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert message in fails(capsys, "generate", *arguments, "--model", folder)
