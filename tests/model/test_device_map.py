"""Test a model sharded across devices: measurements are the same, and unsupported uses are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pandas as pd
import pytest
import torch
from helpers import equal_up_to_rounding, fails, gated, logits, make_layouts, tiny_model
from marks import slow_after
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.base.device import AUTO, measuring_device
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import evaluate
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model import weights
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import save
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing.density import probe
from spkv_nas.probing.measure import measure_signal
from spkv_nas.probing.priced import learn_gates


def parted(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Offload most layers of the model to disk with accelerate, so that their weights are on the meta device."""
    places = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.2": "cpu",
    }
    places |= dict.fromkeys(("model.layers.1", "model.layers.3", "model.norm", "lm_head"), "disk")
    accelerate.dispatch_model(model, places, offload_dir=folder)
    assert any(parameter.is_meta for parameter in model.parameters())
    return model


@pytest.mark.parametrize("chunk", [1 << 28, 97 * 4 * 16], ids=["whole", "in chunks"])
def test_nll_and_scores(
    chunk: int, blocks: TokenBlocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spkv_nas.base.memory.CHUNK_BYTES", chunk)
    whole, other = evaluate(gated(), blocks), evaluate(parted(gated(), tmp_path / "gated"), blocks)
    assert whole.density == other.density
    assert equal_up_to_rounding(whole.nll.total, other.nll.total)
    layouts = [None, *make_layouts("one", "two", "three").values()]
    result = zero_shot(parted(tiny_model(), tmp_path / "dense"), layouts, blocks)
    for one, same in zip(result, zero_shot(tiny_model(), layouts, blocks), strict=True):
        assert equal_up_to_rounding(one.total, same.total)


def test_density(blocks: TokenBlocks, tmp_path: Path) -> None:
    result = probe(parted(gated(), tmp_path / "model"), blocks)
    pd.testing.assert_frame_equal(result.rows, probe(gated(), blocks).rows)


@pytest.mark.filterwarnings("ignore:the model predicts")
@pytest.mark.parametrize(
    "signal", slow_after(2, ["attention-mass", "retrieval", "add-one-head", "leave-one-out"])
)
def test_signals(signal: str, blocks: TokenBlocks, tmp_path: Path) -> None:
    result = measure_signal(signal, parted(tiny_model(), tmp_path / "model"), blocks, window=6)
    pd.testing.assert_frame_equal(
        result.rows, measure_signal(signal, tiny_model(), blocks, window=6).rows
    )


def test_no_backward_through_offloaded_weights(blocks: TokenBlocks, tmp_path: Path) -> None:
    model = parted(tiny_model(), tmp_path / "model")
    with pytest.raises(UserError, match="cannot backpropagate through weights"):
        learn_gates(model, blocks, GateConfig(window=4, target_density=0.3))
    for signal in ("duo", "head-gates"):
        with pytest.raises(UserError, match="cannot backpropagate through weights"):
            measure_signal(signal, model, blocks, window=6)


@pytest.mark.parametrize(("free", "expected"), [(150_000, {0, 1}), (100_000, {0, 1, "cpu"})])
def test_layers_are_distributed_by_memory(
    free: int, expected: set[int | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = tiny_model(), {}

    def dispatch(model: PreTrainedModel, places: dict[str, Any], **_: Any) -> PreTrainedModel:
        made.update(places)
        return model

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(weights.memory, "available_bytes", lambda device: free)
    monkeypatch.setattr(accelerate, "dispatch_model", dispatch)
    weights.dispatch(model)
    assert set(made.values()) == expected
    assert made["model.embed_tokens"] == 0  # where tokens go
    layers = {name: where for name, where in made.items() if name.startswith("model.layers.")}
    assert len(layers) == 4  # none is parted itself
    assert list(layers.values()) == sorted(layers.values(), key=str)


class TestRefusals:
    def test_with_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(
            UserError, match="--device auto places a model on all GPUs in one process, but torchrun"
        ):
            measuring_device(AUTO)

    def test_of_what_trains_or_generates(
        self, recipe_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for command in (["train", recipe_file], ["generate", "a", "--model", "embedded:dense"]):
            assert "--device auto is for probe, evaluate and score" in fails(
                capsys, *command, "--device", "auto"
            )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_the_cpu(
    text: Path,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(tiny_model(vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path / "model")
    result = []
    for device in ("auto", "cpu"):
        where = [
            "--model",
            str(tmp_path / "model"),
            "--data",
            str(text),
            "--context",
            "32",
            "--device",
            device,
        ]
        main(["evaluate", *where, "--workspace", str(tmp_path), "--json", "-q"])
        result.append(capsys.readouterr().out)
    assert result[0] == result[1] != ""


@pytest.mark.parametrize("way", ["cpu", "disk", "device map"])
class TestOffloadedWeights:
    """A model whose weights accelerate holds elsewhere is that of the weights in memory."""

    @staticmethod
    def offload(model: PreTrainedModel, way: str, folder: Path) -> PreTrainedModel:
        if way == "device map":
            return parted(model, folder)
        if way == "disk":
            accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
        else:
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.device.type == "meta"
        return model

    def test_layouts_and_scores(self, way: str, blocks: TokenBlocks, tmp_path: Path) -> None:
        layouts = make_layouts("one", "two")
        model, expected = self.offload(tiny_model(), way, tmp_path), tiny_model()
        scores = zero_shot(model, [*layouts.values()], blocks)
        for one, same in zip(scores, zero_shot(expected, [*layouts.values()], blocks), strict=True):
            assert equal_up_to_rounding(one.total, same.total)
        apply_layout(model, layouts["one"])
        apply_layout(expected, layouts["one"])
        tokens = torch.arange(3, 30)[None]
        assert equal_up_to_rounding(logits(model, tokens), logits(expected, tokens))
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(tokens, **options), expected.generate(tokens, **options))

    def test_gates(self, way: str, blocks: TokenBlocks, tmp_path: Path) -> None:
        """Predictors that are added to offloaded layers stay where these compute."""
        model, expected = self.offload(tiny_model(), way, tmp_path), tiny_model()
        for one in (model, expected):
            attach_gates(one, GateConfig(window=6, hidden_size=16, tau=0.99), seed=0)
        pd.testing.assert_frame_equal(probe(model, blocks).rows, probe(expected, blocks).rows)


def test_errors_of_the_model_itself_are_named() -> None:
    """They are the same without SP-KV attention, which is not blamed."""
    model = tiny_model()
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(31, 48)
    with pytest.raises(
        UserError,
        match="cannot run on two tokens, before any gates or layout: mat1 and mat2 shapes",
    ):
        apply_layout(model, make_layouts("one")["one"])
