"""Test learned sinks that are added to the local heads of a hybrid: numbers, files, generation and other layouts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import check_generation, equal_up_to_rounding, logits, tiny_model
from spkv_kernels import attention
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import Layout, UserError, apply_layout, detach, layout_applied
from spkv_nas.base.manifest import MANIFEST
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import evaluate
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.attach import detached
from spkv_nas.model.attention import attention_layers
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.config_section import has_learned_sinks
from spkv_nas.model.export.export import export
from spkv_nas.model.learned_sinks import LearnedSinks, layer_learned_sinks
from spkv_nas.model.windows import add_learned_sinks, full_attention

MIXED = Layout(("GL", "LL", "GG", "LG"), 6, sinks=1)
LAYERWISE = Layout(("GG", "LL", "LL", "GG"), 6)


def initial(model: PreTrainedModel) -> list[Tensor]:
    """Return logits large enough that they matter, other ones in every layer and head."""
    return [torch.linspace(-1.0, 2.0, 4) + index for index, _ in enumerate(attention_layers(model))]


def hybrid(layout: Layout = MIXED, family: str = "llama", **options: object) -> PreTrainedModel:
    """Return a hybrid with learned sinks."""
    model = tiny_model(family, vocab_size=300, **options)
    model.generation_config.eos_token_id = None
    apply_layout(model, layout)
    add_learned_sinks(model, initial(model))
    return model


def granite_swa(
    source: PreTrainedModel, layer_types: list[str], sinks: list[Tensor]
) -> PreTrainedModel:
    """Return the weights of a Llama in the architecture of transformers that has learned sinks in every head."""
    options = {"attention_multiplier": 8**-0.5, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    model = tiny_model(
        "granite_swa", vocab_size=300, sliding_window=6, layer_types=layer_types, **options
    )
    weights = {
        name: tensor for name, tensor in source.state_dict().items() if "learned_sinks" not in name
    }
    weights |= {f"model.layers.{i}.self_attn.sinks": values for i, values in enumerate(sinks)}
    model.load_state_dict(weights)
    return model


def modules(model: PreTrainedModel) -> list[LearnedSinks | None]:
    return [layer_learned_sinks(layer) for layer in attention_layers(model).values()]


def test_visible_keys_keep_their_weights_under_the_logit_of_a_query() -> None:
    """With the log-sum-exp of all hidden keys as learned sink, only their values are missing."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 30, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    scores = q[0, :, -1:] @ k[0].mT * 8**-0.5
    visible = torch.tensor([*range(2), *range(25, 30)])
    expected = scores.softmax(-1)[..., visible] @ v[0][:, visible]
    sink_logits = scores[0:, 0, 2:25].logsumexp(-1)
    out = attention(q, k, v, window=5, sinks=2, sink_logits=sink_logits, backend="reference")
    assert torch.allclose(out[0, :, -1], expected[:, 0], atol=1e-12)
    without = attention(q, k, v, window=5, sinks=2, backend="reference")
    assert not torch.allclose(without[0, :, -1], expected[:, 0], atol=1e-2)


def test_attention_and_gradients_are_those_of_granite_swa(tokens: Tensor) -> None:
    """Plain transformers is the oracle for whole layers; its model under our layout is for mixed ones."""
    for layout in (LAYERWISE, MIXED):
        model = hybrid(layout)
        sinks = [
            torch.full((4,), -1e4) if learned is None else learned().detach().clamp(min=-1e4)
            for learned in modules(model)
        ]
        kinds = [
            "full_attention" if row == "GG" or layout is MIXED else "sliding_attention"
            for row in layout.heads
        ]
        other = granite_swa(model, kinds, sinks)
        if layout is MIXED:
            apply_layout(other, layout)
        assert torch.allclose(logits(model, tokens), logits(other, tokens), atol=1e-5)
        for subject in (model, other):
            subject(input_ids=tokens, labels=tokens).loss.backward()
        for learned, layer in zip(modules(model), other.model.layers, strict=True):
            if learned is not None:
                is_local = torch.tensor(learned.is_local).repeat_interleave(2)
                assert torch.allclose(
                    learned.logits.grad, layer.self_attn.sinks.grad[is_local], rtol=1e-3, atol=1e-7
                )
                assert learned.logits.grad.abs().min() > 0


def test_only_local_heads_have_parameters() -> None:
    model = hybrid()
    sizes = [None if learned is None else learned.logits.numel() for learned in modules(model)]
    assert sizes == [2, 4, None, 2]
    first = modules(model)[0]
    assert first is not None
    assert first().tolist()[:2] == [-math.inf, -math.inf]
    assert torch.equal(first.logits, initial(model)[0][2:])
    gemma = tiny_model(
        "gemma3_text", head_dim=8, sliding_window=4, layer_types=["sliding_attention"] * 4
    )
    apply_layout(gemma, Layout(("LL",) * 4, 4))
    add_learned_sinks(gemma)
    assert modules(gemma) == [None] * 4  # native sliding layers were trained without


def test_files_restore_them(
    tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """By our loader and by the Auto classes; in float32 also where the weights are bfloat16."""
    model = hybrid()
    expected = logits(model, tokens)
    save(model, tiny_tokenizer, tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert (config["model_type"], config["spkv"]["layout"]["learned_sinks"]) == ("spkv", True)
    restored, _ = load(tmp_path / "saved")
    assert has_learned_sinks(restored.config)
    assert equal_up_to_rounding(logits(restored, tokens), expected)
    assert equal_up_to_rounding(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), tokens), expected
    )
    rounded, _ = load(tmp_path / "saved", dtype=torch.bfloat16)
    assert rounded.model.layers[1].mlp.up_proj.weight.dtype == torch.bfloat16
    for learned, original in zip(modules(rounded), modules(model), strict=True):
        assert (learned is None) == (original is None)
        assert learned is None or torch.equal(learned.logits, original.logits)
    assert torch.isfinite(logits(rounded, tokens)).all()
    model.save_pretrained(tmp_path / "plain")  # the config is ours in every way of saving
    assert json.loads((tmp_path / "plain/config.json").read_text())["model_type"] == "spkv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learned_sinks": False}, "tensors do not exist in the layers that its config describes"),
        ({"learned_sinks": 1}, "learned_sinks"),
    ],
)
def test_a_damaged_section_is_refused(
    change: dict[str, object], message: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    save(hybrid(), tiny_tokenizer, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["spkv"]["layout"] |= change
    file.write_text(json.dumps(config))
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(UserError, match=message):
        load(tmp_path)


def test_generation_equals_whole_passes() -> None:
    """With left padding, prompts in chunks, and decoding."""
    check_generation(hybrid())


def test_they_belong_to_their_layout(tokens: Tensor) -> None:
    """Full attention and other layouts are without; the same layout, and leaving a context, bring them back."""
    model, plain = hybrid(), tiny_model(vocab_size=300)
    expected, dense = logits(model, tokens), logits(plain, tokens)
    with full_attention(model):
        assert torch.allclose(logits(model, tokens), dense, atol=1e-5)
    assert equal_up_to_rounding(logits(model, tokens), expected)
    with detached(model):
        assert torch.allclose(logits(model, tokens), dense, atol=1e-5)
    assert equal_up_to_rounding(logits(model, tokens), expected)
    apply_layout(plain, LAYERWISE)
    with layout_applied(model, LAYERWISE):
        assert equal_up_to_rounding(logits(model, tokens), logits(plain, tokens))
    assert equal_up_to_rounding(logits(model, tokens), expected)
    renamed = Layout(MIXED.heads, MIXED.window, "renamed", sinks=1)
    with layout_applied(model, renamed):
        assert equal_up_to_rounding(logits(model, tokens), expected)
    apply_layout(model, renamed)
    assert has_learned_sinks(model.config)
    assert equal_up_to_rounding(logits(model, tokens), expected)
    apply_layout(model, LAYERWISE)
    assert not has_learned_sinks(model.config)
    assert equal_up_to_rounding(logits(model, tokens), logits(plain, tokens))
    detach(model)
    assert not any("learned_sinks" in name for name in model.state_dict())


def test_scores_warn_that_they_leave_them_out(blocks: TokenBlocks) -> None:
    """A hybrid's own layout is scored like any other: on its weights, without what only it was trained with."""
    model = hybrid()
    plain = tiny_model(vocab_size=300)
    with pytest.warns(UserWarning, match="scores leave them out"):
        (score,) = zero_shot(model, [MIXED], blocks)
    assert score.mean == pytest.approx(zero_shot(plain, [MIXED], blocks)[0].mean, abs=1e-6)
    assert abs(score.mean - evaluate(model, blocks).nll.mean) > 1e-4


def test_models_that_cannot_have_them() -> None:
    model = tiny_model()
    with pytest.raises(UserError, match="this model has no layout"):
        add_learned_sinks(model)
    model = tiny_model("gpt_oss", vocab_size=300)
    layout = Layout(("LL", "GL", "LL", "LG"), 8)
    apply_layout(model, layout)
    text = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(0))
    expected = logits(model, text)
    with pytest.raises(
        UserError, match=r"learned sinks of its own .*: leave out branch.sinks: learned"
    ):
        add_learned_sinks(model)
    assert modules(model) == [None] * 4
    assert equal_up_to_rounding(logits(model, text), expected)


def test_exports_keep_them(
    tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Layouts of whole layers too: architectures with layer_types have no such parameters."""
    model = hybrid(LAYERWISE)
    save(model, tiny_tokenizer, tmp_path / "hybrid")
    with pytest.raises(
        UserError, match="its local heads have learned sinks, for which it has no parameters"
    ):
        export(None, tmp_path / "hybrid", tmp_path / "native", to="native")
    export(None, tmp_path / "hybrid", tmp_path / "out", to="spkv")
    assert equal_up_to_rounding(logits(load(tmp_path / "out")[0], tokens), logits(model, tokens))
    with pytest.warns(UserWarning, match="trained for another layout"):
        export(MIXED, tmp_path / "hybrid", tmp_path / "other", to="spkv")
    assert not has_learned_sinks(load(tmp_path / "other")[0].config)
