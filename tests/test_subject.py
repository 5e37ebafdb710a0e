"""What the measuring commands measure, and what they call it: one rule for probe, evaluate and score."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import gated, tiny_model
from transformers import PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.model.checkpoint import save
from spkv_nas.stages.common import Subject, model_name
from spkv_nas.stages.options import EvaluateOptions, ProbeOptions, ScoreOptions, SubjectOptions
from spkv_nas.stages.probe import probe


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """A checkpoint with gates."""
    folder = tmp_path / "checkpoint"
    save(gated(), tiny_tokenizer, folder)
    return folder


def test_a_model_in_this_folder_is_called_after_it(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``probe --model . --data x`` took the empty name of ``Path(".")`` and wrote into probes/ itself."""
    monkeypatch.chdir(checkpoint)
    place = tmp_path / "workspace"
    main(["probe", "--model", ".", "--data", str(text), "--block-size", "32", "--workspace", str(place)])
    assert [path.name for path in (place / "probes").iterdir()] == ["checkpoint"]
    assert (place / "probes" / "checkpoint" / "density.csv").is_file()


def test_an_embedded_model_on_other_text_leaves_the_demo_alone(text: Path, tmp_path: Path) -> None:
    """``probe --model embedded:reference --data x`` made a folder ``embedded:reference``."""
    probe(ProbeOptions(model="embedded:reference", data=[str(text)], block_size=64, workspace=tmp_path / "w"))
    assert [path.name for path in (tmp_path / "w" / "probes").iterdir()] == ["embedded-reference"]


@pytest.mark.parametrize("options", [ProbeOptions, EvaluateOptions, ScoreOptions], ids=lambda one: one.__name__)
class TestName:
    """Every command asks the same rule."""

    def name(self, options: type[SubjectOptions], **given: object) -> str:
        return Subject.of(options(**given), "embedded:reference", "measure on").name

    def test_own_checkpoint(self, options: type[SubjectOptions], checkpoint: Path, text: Path) -> None:
        assert self.name(options, model=str(checkpoint), data=[str(text)]) == "checkpoint"
        assert self.name(options, model=f"{checkpoint}/../checkpoint/", data=[str(text)]) == "checkpoint"

    def test_embedded(self, options: type[SubjectOptions], text: Path) -> None:
        assert self.name(options, model="embedded:reference") == "stdlib-21x3"
        assert self.name(options, model="embedded:reference", data=[str(text)]) == "embedded-reference"

    def test_given(self, options: type[SubjectOptions], text: Path) -> None:
        assert self.name(options, model="embedded:reference", data=[str(text)], name="mine") == "mine"

    def test_own_checkpoint_needs_text(self, options: type[SubjectOptions], checkpoint: Path) -> None:
        with pytest.raises(UserError, match="--model needs --data: the text to measure on"):
            self.name(options, model=str(checkpoint))


def test_a_config_file_is_called_after_its_folder(tmp_path: Path) -> None:
    assert model_name(str(tmp_path / "model" / "config.json")) == "model"
    assert model_name("organisation/model") == "model"


def test_training_goes_on_after_a_probe(
    checkpoint: Path, text: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """As the README's Python example has it: probe left the gates hard, so that predictors got no gradient."""
    import torch

    import spkv_nas
    from spkv_nas.data.blocks import build_blocks
    from spkv_nas.data.sources import documents
    from spkv_nas.model.gates import predictor_parameters

    model = tiny_model(vocab_size=300)
    spkv_nas.attach_gates(model, spkv_nas.GateConfig(window=6, hidden_size=16))
    blocks = build_blocks(documents([str(text)], Path()), tiny_tokenizer, 32)
    spkv_nas.probe(model, blocks)
    tokens = torch.from_numpy(blocks.tokens[:2]).long()
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in predictor_parameters(model))
