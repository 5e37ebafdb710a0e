"""Test layouts with sink tokens on models: what local heads see, and how windows and sinks are set and restored."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import (
    FAMILIES,
    check_generation,
    equal_up_to_rounding,
    save_with_tokenizer,
    sharpen_attention,
    tiny_model,
)
from marks import slow
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import GateConfig, Layout, attach_gates, layout_applied
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.attention import attention_layers, layer_states
from spkv_nas.model.checkpoint import load
from spkv_nas.model.config_section import checkpoint_layout
from spkv_nas.model.learned_sinks import layer_learned_sinks
from spkv_nas.model.windows import add_learned_sinks, apply_layout, every_head_local, full_attention

WINDOW = 6
LAYOUT = Layout(("GL",) * 4, WINDOW, sinks=3)
LENGTH = 24


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def logits(model: PreTrainedModel, tokens: Tensor, **options: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False, **options).logits


def visible_keys(sinks: int, local: tuple[bool, ...], native: int = LENGTH) -> Tensor:
    """Return the mask [1, Hq, T, T] of a layout; ``local`` says so of each query head, global ones see ``native``."""
    t, s = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    reach = [(t - s < WINDOW) | (s < sinks) if one else t - s < native for one in local]
    visible = torch.stack([(s <= t) & seen for seen in reach])
    return torch.where(visible, 0.0, -torch.inf)[None]


def masked(
    model: PreTrainedModel,
    tokens: Tensor,
    sinks: int,
    local: tuple[bool, ...],
    native: int = LENGTH,
) -> Tensor:
    """Compute logits by eager attention under the mask of a layout."""
    model.set_attn_implementation("eager")
    return logits(model, tokens, attention_mask=visible_keys(sinks, local, native))


@pytest.mark.parametrize("sinks", [0, 1, 4, LENGTH])
def test_local_heads_see_the_first_tokens_and_their_window(sinks: int, tokens: Tensor) -> None:
    expected = masked(tiny_model(), tokens, sinks, (False, False, True, True))
    model = tiny_model()
    apply_layout(model, replace(LAYOUT, sinks=sinks))
    actual = logits(model, tokens)
    assert torch.allclose(actual, expected, atol=1e-5)
    if sinks < LENGTH:
        assert not torch.allclose(actual, logits(tiny_model(), tokens), atol=1e-3)
    with every_head_local(model, WINDOW, sinks):
        everywhere = logits(model, tokens)
    assert torch.allclose(everywhere, masked(tiny_model(), tokens, sinks, (True,) * 4), atol=1e-5)
    assert equal_up_to_rounding(logits(model, tokens), actual)


@pytest.mark.parametrize(
    "family",
    [
        family if family in ("llama", "qwen3", "gemma3_text", "phi3") else slow(family)
        for family in FAMILIES
    ],
)
def test_heads_of_several_windows_equal_an_eager_mask(
    family: str, tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """In float64, with other windows in every layer; also after saving and loading."""
    model = sharpen_attention(
        tiny_model(family, vocab_size=300, num_attention_heads=8, num_key_value_heads=4)
    )
    dense = copy.deepcopy(model).double()
    layout = Layout(("NLGM", "LLLL", "GMNG", "MGLM"), windows={"L": 2, "M": 5, "N": 11}, sinks=1)
    apply_layout(model, layout)
    save_with_tokenizer(model, tiny_tokenizer, tmp_path)
    restored, _ = load(tmp_path)
    assert equal_up_to_rounding(logits(restored, tokens), logits(model, tokens))
    # Replace the mask of every layer of the dense model
    dense.set_attn_implementation("eager")
    layers = [module for name, module in dense.named_modules() if name.endswith("self_attn")]
    t, s = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    for index, (layer, windows) in enumerate(zip(layers, layout.head_windows, strict=True)):
        if family == "gemma3_text" and index % 2 == 0:  # its native window
            seen = [t - s < 4] * 8
        else:
            seen = [(t - s < (window or LENGTH)) | (s < 1) for window in windows for _ in range(2)]
        mask = torch.where(torch.stack(seen) & (s <= t), 0.0, -torch.inf)[None].double()
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}),
            with_kwargs=True,
        )
    expected = logits(dense, tokens)
    assert torch.allclose(
        logits(model.double(), tokens), expected, atol=1e-6 * float(expected.abs().max())
    )


def test_window_and_sinks_can_be_overridden(tokens: Tensor) -> None:
    model = tiny_model()
    dense = logits(model, tokens)
    with layout_applied(model, LAYOUT, sinks=0):
        assert equal_up_to_rounding(
            logits(model, tokens), logits(hybrid(replace(LAYOUT, sinks=0)), tokens)
        )
        assert checkpoint_layout(model) == replace(LAYOUT, sinks=0)
    with layout_applied(model, LAYOUT, 2, 5):
        assert equal_up_to_rounding(
            logits(model, tokens), logits(hybrid(replace(LAYOUT, window=2, sinks=5)), tokens)
        )
    assert equal_up_to_rounding(logits(model, tokens), dense)
    with pytest.raises(UserError, match="sinks is -1"):
        apply_layout(model, LAYOUT, sinks=-1)


def hybrid(layout: Layout, model: PreTrainedModel | None = None) -> PreTrainedModel:
    model = tiny_model() if model is None else model
    apply_layout(model, layout)
    return model


def test_full_attention_lifts_and_restores_them(tokens: Tensor) -> None:
    """Also those of gates, whose windows a measurement may replace."""
    gated = tiny_model()
    attach_gates(gated, GateConfig(window=WINDOW, sinks=2, heads=["SG", "GL", "SL", "GG"]), seed=0)
    for model in (hybrid(LAYOUT), gated):
        before = [(state.windows, state.sinks, state.local_sinks) for state in layer_states(model)]
        expected = logits(model, tokens)
        with full_attention(model) as states:
            assert [state.local_sinks for state in states] == [0] * 4
            for state in states:
                state.windows = (WINDOW, WINDOW)
            assert torch.allclose(
                logits(model, tokens), masked(tiny_model(), tokens, 0, (True,) * 4), atol=1e-5
            )
        assert [
            (state.windows, state.sinks, state.local_sinks) for state in layer_states(model)
        ] == before
        assert equal_up_to_rounding(logits(model, tokens), expected)


def test_a_local_head_of_gates_gets_none() -> None:
    """The operator's sinks are for layouts: gates keep their sink tokens themselves, and only where they decide."""
    model = tiny_model()
    attach_gates(model, GateConfig(window=WINDOW, sinks=2, heads=["GL", "GL", "GL", "SL"]), seed=0)
    assert [state.sinks for state in layer_states(model)] == [(2, 0)] * 4
    assert [state.local_sinks for state in layer_states(model)] == [0] * 4


def test_layers_with_a_native_window_get_none() -> None:
    """They were trained without: in a layout, and with every head local."""
    model = tiny_model("gemma3_text")
    apply_layout(model, LAYOUT)
    native = [state.native_window is not None for state in layer_states(model)]
    assert {*native} == {False, True}
    assert [state.local_sinks for state in layer_states(model)] == [
        0 if one else 3 for one in native
    ]
    with every_head_local(model, 2, 3):
        assert [state.local_sinks for state in layer_states(model)] == [
            0 if one else 3 for one in native
        ]


class TestNativeWindowOfAllLayers:
    """Global heads keep the native window, and only local ones see sink tokens."""

    NATIVE = 10

    def model(self) -> PreTrainedModel:
        return tiny_model("mistral", vocab_size=300, sliding_window=self.NATIVE)

    def test_local_heads_see_the_first_tokens_and_their_window(self, tokens: Tensor) -> None:
        model = self.model()
        apply_layout(model, LAYOUT)
        actual = logits(model, tokens)
        expected = masked(
            self.model(), tokens, LAYOUT.sinks, (False, False, True, True), self.NATIVE
        )
        assert torch.allclose(actual, expected, atol=1e-5)
        assert not torch.allclose(
            actual, logits(hybrid(replace(LAYOUT, sinks=0), self.model()), tokens), atol=1e-3
        )
        with every_head_local(model, WINDOW, LAYOUT.sinks):
            everywhere = logits(model, tokens)
        assert torch.allclose(
            everywhere, masked(self.model(), tokens, LAYOUT.sinks, (True,) * 4), atol=1e-5
        )

    def test_gradients_are_those_under_the_mask(self, tokens: Tensor) -> None:
        """In training, too, the operator takes the sink tokens of each head."""
        weights = torch.randn(2, LENGTH, 300, generator=torch.Generator().manual_seed(1))
        gradients = []
        for model in (hybrid(LAYOUT, self.model()), self.model()):
            mask: dict[str, Tensor] = {}
            if not layer_states(model):
                model.set_attn_implementation("eager")
                mask["attention_mask"] = visible_keys(
                    LAYOUT.sinks, (False, False, True, True), self.NATIVE
                )
            (model(input_ids=tokens, use_cache=False, **mask).logits * weights).sum().backward()
            gradients.append(
                torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
            )
        assert torch.allclose(*gradients, rtol=1e-3, atol=1e-4)

    def test_a_window_as_wide_as_the_native_one_gets_none(self, tokens: Tensor) -> None:
        model = hybrid(replace(LAYOUT, window=self.NATIVE), self.model())
        assert [state.local_sinks for state in layer_states(model)] == [0] * 4
        assert torch.allclose(logits(model, tokens), logits(self.model(), tokens), atol=1e-5)

    def test_generation_equals_whole_passes(self) -> None:
        """Beyond the native window, which is the ring of global heads."""
        model = self.model()
        model.generation_config.eos_token_id = None
        apply_layout(model, LAYOUT)
        check_generation(model)

    def test_learned_sinks_are_for_local_heads(self) -> None:
        model = hybrid(replace(LAYOUT, heads=("LL", "GL", "GG", "GL"), sinks=0), self.model())
        add_learned_sinks(model)
        learned = [layer_learned_sinks(layer) for layer in attention_layers(model).values()]
        assert [None if one is None else one.logits.numel() for one in learned] == [4, 2, None, 2]


def test_scores_distinguish_them(blocks: TokenBlocks, tmp_path: Path) -> None:
    """Two layouts with the same windows had one score, on disk too."""
    model = tiny_model(vocab_size=300)
    layouts = [replace(LAYOUT, sinks=number) for number in (0, 2, 4)]
    everything = Layout(("GG",) * 4, WINDOW, sinks=4)
    scores = zero_shot(model, [None, everything, *layouts], blocks, cache=tmp_path)
    assert len({round(score.mean, 5) for score in scores}) == 4
    assert scores[0].mean == pytest.approx(scores[1].mean, rel=1e-6)
    for layout, score in zip(layouts, scores[2:], strict=True):
        with layout_applied(model, layout):
            assert zero_shot(model, [layout], blocks)[0].mean == pytest.approx(score.mean, rel=1e-6)
    assert zero_shot(model, layouts[1:2], blocks, cache=tmp_path)[0].mean == scores[3].mean
