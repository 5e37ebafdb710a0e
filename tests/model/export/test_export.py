"""Test exports as a function: which layout and form the folder gets, and what the check in a fresh process reports."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import change_config
from helpers import equal_up_to_rounding, gated, logits, tiny_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import manifest
from spkv_nas.base.errors import UserError
from spkv_nas.model.attach import detach
from spkv_nas.model.checkpoint import load, read_shape, save
from spkv_nas.model.config_section import checkpoint_layout
from spkv_nas.model.export import native, plain_logits, verify_export
from spkv_nas.model.export.export import export
from spkv_nas.model.export.target import TargetError
from spkv_nas.model.windows import apply_layout

MIXED = Layout(("GL", "LL", "LG", "GG"), 6)
LAYERWISE = Layout(("GG", "LL", "LL", "GG"), 6)


def write(
    layout: Layout | None, folder: Path, tokenizer: PreTrainedTokenizerBase, family: str = "llama"
) -> Path:
    """Write a dense checkpoint, or a hybrid with ``layout``."""
    model = tiny_model(family, vocab_size=300)
    if layout is not None:
        apply_layout(model, layout)
    save(model, tokenizer, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", [MIXED, LAYERWISE], ids=["mixed", "layerwise"])
def test_a_hybrid_is_exported_with_its_layout(
    layout: Layout, tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The checkpoint holds the layout, so no file is needed."""
    hybrid = write(layout, tmp_path / "hybrid", tiny_tokenizer)
    result = export(None, hybrid, tmp_path / "out")
    expected = logits(load(hybrid)[0], tokens)
    if layout is LAYERWISE:
        assert "a native ministral checkpoint" in result.form
        assert "over 70 tokens in a process of its own" in result.form
        assert (result.target, result.rejected) == ("native", {})
        assert torch.allclose(
            logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tokens),
            expected,
            atol=1e-5,
        )
    else:
        assert "loads with spkv_nas.load" in result.form
        assert result.target == "spkv"
        assert equal_up_to_rounding(logits(load(tmp_path / "out")[0], tokens), expected)


def test_sink_tokens_are_exported_and_restored(
    tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """No native architecture expresses them, so a layout of whole layers keeps the custom model type, too."""
    layout = replace(LAYERWISE, sinks=2)
    dense = write(None, tmp_path / "dense", tiny_tokenizer)
    result = export(layout, dense, tmp_path / "out")
    assert result.target == "spkv"
    assert "see 2 sink tokens, which layer_types cannot express" in result.rejected["native"]
    assert json.loads((tmp_path / "out/config.json").read_text())["spkv"]["layout"]["sinks"] == 2
    restored = load(tmp_path / "out")[0]
    assert checkpoint_layout(restored) == replace(layout, strategy="custom")
    expected, without = tiny_model(vocab_size=300), tiny_model(vocab_size=300)
    apply_layout(expected, layout)
    apply_layout(without, LAYERWISE)
    assert torch.allclose(logits(restored, tokens), logits(expected, tokens), atol=1e-6)
    assert not torch.allclose(logits(restored, tokens), logits(without, tokens), atol=1e-4)
    assert "sinks" not in without.config.spkv["layout"]
    export(None, tmp_path / "out", tmp_path / "again")
    assert checkpoint_layout(load(tmp_path / "again")[0]) == checkpoint_layout(restored)
    with pytest.raises(
        UserError, match=r"(?s)sink tokens.*layout convert --sinks 0.*export to 'auto'"
    ):
        export(layout, dense, tmp_path / "native", to="native")
    everything = Layout(("GG",) * 4, 6, sinks=2)  # no head is local
    assert (
        native.native_config(tiny_model().config, everything).layer_types == ["full_attention"] * 4
    )


def test_weights_trained_for_another_layout_are_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    hybrid = write(MIXED, tmp_path / "hybrid", tiny_tokenizer)
    with pytest.warns(
        UserWarning, match=f"trained for another layout \\(hash {MIXED.hash}\\) than the one given"
    ):
        export(Layout(("LG", "LL", "LG", "GG"), 6), hybrid, tmp_path / "other")
    export(Layout(MIXED.heads, MIXED.window, "renamed"), hybrid, tmp_path / "same")
    with pytest.warns(UserWarning, match="another layout"):
        export(Layout(MIXED.heads, 5), hybrid, tmp_path / "window")
    assert load(tmp_path / "window")[0].config.spkv["layout"]["window"] == 5


@pytest.mark.parametrize("kind", ["dense", "gates"])
def test_a_checkpoint_without_a_layout(
    kind: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    save(
        tiny_model(vocab_size=300) if kind == "dense" else gated(), tiny_tokenizer, tmp_path / kind
    )
    with pytest.raises(UserError, match="has no layout to export\ngive a layout"):
        export(None, tmp_path / kind, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("fresh_process")
class TestFreshProcess:
    @pytest.mark.slow
    def test_logits_that_differ_are_refused(
        self,
        tokens: Tensor,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        tiny_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Gemma 3 with other layer types has other positions, which only the comparison of logits finds."""
        dense = write(None, tmp_path / "dense", tiny_tokenizer, "gemma3_text")
        monkeypatch.setattr(native, "_positions", lambda config: [None] * config.num_hidden_layers)
        layout = replace(LAYERWISE, window=4)  # that of the model
        result = export(layout, dense, tmp_path / "out")
        assert result.target == "spkv"
        assert result.rejected["native"].startswith("its logits in plain transformers differ by 0.")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "spkv"
        hybrid = tiny_model("gemma3_text", vocab_size=300)
        apply_layout(hybrid, layout)
        assert equal_up_to_rounding(
            logits(load(tmp_path / "out")[0], tokens), logits(hybrid, tokens)
        )

    @pytest.mark.parametrize(
        ("module", "name", "value", "message"),
        [
            (
                "verify_export",
                "_MIN_SECONDS",
                0.01,
                r"was not compared with plain transformers within .* nothing was written",
            ),
            (
                "verify_export.sys",
                "executable",
                "false",
                r"its process ended with 1 \(no message\)\nit needs memory",
            ),
            (
                "verify_export.tempfile",
                "tempdir",
                "/nowhere",
                "nothing was written: .*No such file.*\nfree disk space in /nowhere",
            ),
        ],
        ids=["slow", "dead", "no-room"],
    )
    def test_that_does_not_answer(
        self,
        module: str,
        name: str,
        value: Any,
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        tiny_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        dense = write(None, tmp_path / "dense", tiny_tokenizer)
        monkeypatch.setattr("spkv_nas.model.export.verify_export._SLOWER", 0.0)
        monkeypatch.setattr(f"spkv_nas.model.export.{module}.{name}", value)
        with pytest.raises(UserError, match=message):
            export(LAYERWISE, dense, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["dense"]

    @pytest.mark.parametrize(
        "error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 9")]
    )
    def test_too_little_memory_is_raised(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(**_: Any) -> None:
            raise error

        monkeypatch.setattr(plain_logits, "_loaded_logits", fail)
        with pytest.raises(type(error)):
            plain_logits._answered({"logits": "x"})

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ("ValueError: no", "plain transformers does not run it: ValueError: no"),
            (torch.tensor([[1.0, 2.0001]]), "differ by 5e-05 of the largest"),
            (torch.tensor([[1.0, torch.nan]]), "differ by nan"),
        ],
    )
    def test_every_difference_counts(self, answer: torch.Tensor | str, message: str) -> None:
        hybrid = verify_export.ReferenceLogits([0], torch.tensor([[1.0, 2.0]]), 1.0)
        assert verify_export.compare(torch.tensor([[1.0, 2.00001]]), hybrid) > 0
        with pytest.raises(TargetError, match=message):
            verify_export.compare(answer, hybrid)


def test_weights_keep_their_dtypes_and_bits(
    tmp_path: Path,
    tokens: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Logits are compared in float32, and weights are written unchanged, also with mixed dtypes."""
    model = tiny_model(vocab_size=300).to(torch.bfloat16)
    monkeypatch.setattr(verify_export, "check", lambda *_: 0.0)
    save(model, tiny_tokenizer, tmp_path / "dense")
    export(LAYERWISE, tmp_path / "dense", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("dense", "out"))
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.model.norm.float()
    with verify_export.plain_logits.float32(model):
        result = logits(model, tokens)
        assert model.model.layers[1].mlp.down_proj.weight.dtype is torch.bfloat16  # between uses
    assert model.model.norm.weight.dtype is torch.float32
    assert model.lm_head.weight.dtype is torch.bfloat16
    assert {
        parameter
        for part in verify_export.plain_logits.parts(model)
        for parameter in part.parameters()
    } == set(model.parameters())
    assert equal_up_to_rounding(result, logits(model.float(), tokens))


def test_a_model_with_other_layer_names(
    tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=64, vocab_size=300)
    torch.manual_seed(0)
    save(GPT2LMHeadModel(config), tiny_tokenizer, tmp_path / "dense")
    layout = Layout(("GL", "LL"), 6)
    export(layout, tmp_path / "dense", tmp_path / "out")
    with pytest.raises(Exception, match="n_layer"):
        GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    expected, _ = load(tmp_path / "dense")
    apply_layout(expected, layout)
    assert equal_up_to_rounding(logits(load(tmp_path / "out")[0], tokens), logits(expected, tokens))


class TestOwnType:
    @pytest.fixture
    def folder(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
        """Copy of the folder that the first of these tests exports."""
        shared = tmp_path.parent / "own-type"
        if not shared.exists():
            export(MIXED, write(None, shared / "dense", tiny_tokenizer), shared / "out")
        shutil.copytree(shared, tmp_path, dirs_exist_ok=True)
        return tmp_path / "out"

    def test_the_family_class_does_not_load_it_as_dense(self, folder: Path) -> None:
        """transformers only warns where a named class has another model type."""
        with pytest.raises(Exception, match="num_hidden_layers") as error:
            LlamaForCausalLM.from_pretrained(folder)
        assert "load it with spkv_nas.load" in str(error.value)

    def test_the_auto_class_is_load(self, folder: Path, tokens: Tensor) -> None:
        expected = logits(load(folder)[0], tokens)
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=False, attn_implementation="sdpa"
        )
        assert equal_up_to_rounding(logits(model, tokens), expected)
        built = AutoModelForCausalLM.from_config(model.config)
        built.load_state_dict(model.state_dict())
        assert equal_up_to_rounding(logits(built.eval(), tokens), expected)
        assert read_shape(folder) == read_shape(folder.parent / "dense")
        model.set_attn_implementation("sdpa")
        with pytest.raises(
            UserError, match=r"attn_implementation 'sdpa' ignores gates and windows: call detach"
        ):
            logits(model, tokens)

    def test_is_kept_when_saved_again_and_removed_when_detached(
        self, folder: Path, tokens: Tensor, tmp_path: Path
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.save_pretrained(tmp_path / "again")
        assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "spkv"
        assert equal_up_to_rounding(
            logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), tokens),
            logits(model, tokens),
        )
        detach(model)
        model.save_pretrained(tmp_path / "plain")
        assert json.loads((tmp_path / "plain" / "config.json").read_text())["model_type"] == "llama"
        assert equal_up_to_rounding(
            logits(LlamaForCausalLM.from_pretrained(tmp_path / "plain"), tokens),
            logits(model, tokens),
        )

    def test_is_exported_again(self, folder: Path, tokens: Tensor, tmp_path: Path) -> None:
        result = export(None, folder, tmp_path / "again")
        assert "not exported as native and granite_swa: layers 0, 2 mix" in str(result)
        assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "spkv"
        assert equal_up_to_rounding(
            logits(load(tmp_path / "again")[0], tokens), logits(load(folder)[0], tokens)
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda c: c.pop("spkv"), "lacks the original model type and number of layers"),
            (lambda c: c.update(spkv=[]), "lacks the original model type and number of layers"),
            (
                lambda c: c["spkv"].pop("stock_type"),
                "lacks the original model type and number of layers",
            ),
            (
                lambda c: c["spkv"].update(stock_type="spkv"),
                "lacks the original model type and number of layers",
            ),
            (lambda c: c["spkv"].update(stock_type=["llama"]), "cannot load"),
            (lambda c: c["spkv"].update(stock_type="t5"), "not text-generating decoders"),
            (lambda c: c["spkv"].update(num_hidden_layers=10**9), "more than 1,000"),
            (lambda c: c["spkv"].update(num_hidden_layers="4"), "num_hidden_layers"),
            (lambda c: c["spkv"]["layout"].update(window=0), r"layout\.window"),
        ],
    )
    def test_damaged(self, change: Any, message: str, folder: Path) -> None:
        (folder / "spkv-manifest.json").unlink()
        change_config(folder, change)
        with pytest.raises(UserError, match=message):
            load(folder)


def test_two_exports_to_one_folder(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first that is complete stays; they shared a temporary folder, and the second removed the first's files."""
    dense, out = write(None, tmp_path / "dense", tiny_tokenizer), tmp_path / "out"
    original = manifest.write_manifest
    others = [MIXED]

    def write_both(folder: Path, *arguments: Any, **options: Any) -> None:
        if others:
            export(others.pop(), dense, out, to="spkv")
        original(folder, *arguments, **options)

    monkeypatch.setattr(manifest, "write_manifest", write_both)
    with pytest.raises(
        UserError, match="out was written by another process in the meantime, and is left as it is"
    ):
        export(LAYERWISE, dense, out, to="spkv")
    assert Layout.read(out / "layout.yaml").heads == MIXED.heads
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "out"}
