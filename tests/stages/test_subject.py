"""Test the subject of measurements and its name: one rule for probe, evaluate and score."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import MessageLog, Recorder, fails, gated, make_table, tiny_model
from model.test_cache_families import FAMILIES as CACHE_FAMILIES
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base.errors import UserError
from spkv_nas.base.workspace import Workspace
from spkv_nas.cli import main
from spkv_nas.data.tokenizer import SeparateDocuments
from spkv_nas.model.checkpoint import save
from spkv_nas.stages.lookup import chosen_table
from spkv_nas.stages.options import SubjectOptions
from spkv_nas.stages.options.evaluate.nll import NLLOptions
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.options.score import ScoreOptions
from spkv_nas.stages.probe import probe
from spkv_nas.stages.sized_model import model_name
from spkv_nas.stages.subject import Measured, Subject, sequence_length


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Checkpoint with gates."""
    folder = tmp_path / "checkpoint"
    save(gated(), tiny_tokenizer, folder)
    return folder


def test_a_model_in_this_folder_has_the_folder_name(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--model .`` is named after the current folder."""
    monkeypatch.chdir(checkpoint)
    workspace = tmp_path / "workspace"
    main(
        [
            "probe",
            "--model",
            ".",
            "--data",
            str(text),
            "--context",
            "32",
            "--workspace",
            str(workspace),
        ]
    )
    assert [path.name for path in (workspace / "probes").iterdir()] == ["checkpoint"]
    assert (workspace / "probes" / "checkpoint" / "density.csv").is_file()


class TestDocuments:
    """A user's documents are read alone, unless the model cannot keep them apart or packed ones are asked for."""

    def load(
        self,
        model: PreTrainedModel,
        folder: Path,
        text: Path,
        tokenizer: PreTrainedTokenizerBase,
        **more: Any,
    ) -> tuple[Measured, list[str]]:
        if not (folder / "model").exists():
            save(model, tokenizer, folder / "model")
        options = ScoreOptions(
            model=str(folder / "model"), data=[str(text)], workspace=folder / "w", **more
        )
        told = MessageLog()
        return Subject.of(options, "embedded:dense", "score on").load(
            told.reporter
        ), told.announced + told.cautioned

    def test_alone_by_default(
        self, tmp_path: Path, text: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = tiny_model(vocab_size=len(tiny_tokenizer))
        measured, told = self.load(model, tmp_path, text, tiny_tokenizer, context="64")
        assert isinstance(measured.blocks.boundaries, SeparateDocuments)
        assert measured.separator.documents == "separate"
        assert any("or more of their own document before them" in line for line in told)
        joined, _ = self.load(
            model, tmp_path, text, tiny_tokenizer, context="64", documents="joined"
        )
        assert not isinstance(joined.blocks.boundaries, SeparateDocuments)

    def test_joined_where_states_cross(
        self, tmp_path: Path, text: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = tiny_model("lfm2", **CACHE_FAMILIES["lfm2"], vocab_size=len(tiny_tokenizer))
        measured, told = self.load(model, tmp_path, text, tiny_tokenizer, context="64")
        assert measured.separator.documents == "joined"
        assert any("cannot keep them apart" in line for line in told)


def test_the_choice_of_a_length_is_announced_once(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes seconds to tokenize the beginnings of many documents."""
    text = tmp_path / "text.txt"
    text.write_text("a text of a few words\n" * 20)
    options = ScoreOptions(model=str(checkpoint), data=[str(text)], workspace=tmp_path / "w")
    with caplog.at_level(logging.INFO, "spkv_nas"):
        first = sequence_length(options)
        again = sequence_length(options)
    assert first == again
    assert caplog.messages == ["choosing the length of sequences"]


@pytest.mark.slow
def test_an_embedded_model_on_other_text_gets_another_name(text: Path, tmp_path: Path) -> None:
    probe(
        ProbeOptions(
            model="embedded:reference", data=[str(text)], context="64", workspace=tmp_path / "w"
        )
    )
    assert [path.name for path in (tmp_path / "w" / "probes").iterdir()] == ["embedded-reference"]


@pytest.mark.parametrize(
    "options", [ProbeOptions, NLLOptions, ScoreOptions], ids=lambda one: one.__name__
)
class TestName:
    """All commands use one rule."""

    def name(self, options: type[SubjectOptions], **values: object) -> str:
        return Subject.of(options(**values), "embedded:reference", "measure on").name

    def test_own_checkpoint(
        self, options: type[SubjectOptions], checkpoint: Path, text: Path
    ) -> None:
        assert self.name(options, model=str(checkpoint), data=[str(text)]) == "checkpoint"
        assert (
            self.name(options, model=f"{checkpoint}/../checkpoint/", data=[str(text)])
            == "checkpoint"
        )

    def test_embedded(self, options: type[SubjectOptions], text: Path) -> None:
        assert self.name(options, model="embedded:reference") == "stdlib-21x3"
        assert (
            self.name(options, model="embedded:reference", data=[str(text)]) == "embedded-reference"
        )

    def test_explicit_name(self, options: type[SubjectOptions], text: Path) -> None:
        assert (
            self.name(options, model="embedded:reference", data=[str(text)], name="mine") == "mine"
        )

    def test_own_checkpoint_needs_text(
        self, options: type[SubjectOptions], checkpoint: Path
    ) -> None:
        with pytest.raises(
            UserError, match="--model needs --data: files or folders with the text to measure on"
        ):
            self.name(options, model=str(checkpoint))


def test_a_config_file_has_the_name_of_its_folder(tmp_path: Path) -> None:
    assert model_name(str(tmp_path / "model" / "config.json")) == "model"
    assert model_name("organisation/model") == "model"


def test_a_checkpoint_has_the_name_of_its_run() -> None:
    assert model_name("runs/mine/branches/sp-kv-0a1b-seed0/final") == "sp-kv-0a1b-seed0"
    assert model_name("runs/mine/dense-0a1b/final/") == "dense-0a1b"
    assert model_name("runs/mine/dense-0a1b/checkpoint-40") == "dense-0a1b-checkpoint-40"
    assert model_name("my/checkpoint-v2") == "checkpoint-v2"


class TestDefaults:
    """Defaults follow what the workspace holds."""

    def test_a_single_probe_is_used(self, tmp_path: Path) -> None:
        workspace = Workspace(tmp_path)
        with pytest.raises(UserError, match=r"no probes in .*probes\nprobe a model first"):
            chosen_table(ProposeOptions(workspace=tmp_path))
        make_table([[0.5, 0.4]]).write(workspace.probe_dir("mine"))
        (tmp_path / "probes" / ".hidden").mkdir()
        workspace.probe_dir("empty").mkdir()
        assert chosen_table(ProposeOptions(workspace=tmp_path)).density.tolist() == [[0.5, 0.4]]

    def test_several_probes_require_a_choice(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        workspace = Workspace(tmp_path)
        for name in ("b", "a"):
            make_table([[0.5, 0.4]]).write(workspace.probe_dir(name))
        for command in ("propose", "report", "search", "train-hybrid"):
            message = fails(capsys, command, "--workspace", tmp_path)
            assert " has 2 probes: choose one with --probe NAME" in message
            for name in ("a", "b"):
                assert f"next: spkv-nas {command} --probe {name} --workspace {tmp_path}" in message

    def test_the_recommended_signal_of_a_model_is_the_default(self, tmp_path: Path) -> None:
        """Unless there are probes of another model, or several of that signal."""
        workspace, table = Workspace(tmp_path), make_table([[0.5, 0.4]])
        for name, signal in (
            ("mine", "density"),
            ("mine-duo", "duo"),
            ("mine-head-gates", "head-gates"),
        ):
            replace(
                table, name=name, record=ProbeRecord.of({"model": "m", "signal": signal})
            ).write(workspace.probe_dir(name))
        messages: list[str] = []
        assert (
            chosen_table(
                ProposeOptions(workspace=tmp_path), Recorder(announced=messages.append)
            ).name
            == "mine-head-gates"
        )
        assert messages == [
            "using probe 'mine-head-gates' (head-gates), one of 3 of this model; --probe selects another"
        ]
        for name, facts in (
            ("other", {"model": "n"}),
            ("again", {"model": "m", "signal": "head-gates"}),
        ):
            replace(table, name=name, record=ProbeRecord.of(facts)).write(workspace.probe_dir(name))
            with pytest.raises(UserError, match="choose one with --probe NAME"):
                chosen_table(ProposeOptions(workspace=tmp_path))
            shutil.rmtree(workspace.probe_dir(name))
        shutil.rmtree(workspace.probe_dir("mine-head-gates"))
        assert chosen_table(ProposeOptions(workspace=tmp_path)).name == "mine"  # densities

    def test_the_default_budget_fits_the_model(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_table([[0.5, 0.4, 0.1, 0.1], [0.5, 0.4, 0.1, 0.1]]).write(tmp_path / "probes" / "mine")
        main(["propose", "--workspace", str(tmp_path)])
        assert "budget: 2 of 8 KV heads, the paper's 2 of 7" in capsys.readouterr().out

    def test_layouts_of_another_model_need_its_recipe(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_table([[0.5, 0.4], [0.5, 0.4]]).write(tmp_path / "probes" / "mine")
        main(["propose", "--workspace", str(tmp_path)])
        for command in ("search", "train-hybrid"):
            message = fails(capsys, command, "--workspace", tmp_path)
            assert "not of an embedded model: give the recipe" in message


def test_training_continues_after_a_probe(
    checkpoint: Path, text: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """``probe`` restores soft gates, so that predictors get a gradient."""
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
