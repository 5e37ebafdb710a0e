"""Test layouts with sink tokens on models: what local heads see, and how windows and sinks are set and restored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas import GateConfig, Layout, SPKVCache, attach_gates, layout_applied
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.zero_shot import kept_layouts, zero_shot
from spkv_nas.model.attention import layer_states
from spkv_nas.model.config_section import checkpoint_layout
from spkv_nas.model.windows import apply_layout, every_head_local, full_attention

WINDOW = 6
LAYOUT = Layout(("GL",) * 4, WINDOW, sinks=3)
LENGTH = 24


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def logits(model: PreTrainedModel, tokens: Tensor, **options: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False, **options).logits


def masked(model: PreTrainedModel, tokens: Tensor, sinks: int, local: tuple[bool, ...]) -> Tensor:
    """Compute logits by eager attention under a mask [1, Hq, T, T]; ``local`` says so of each query head."""
    model.set_attn_implementation("eager")
    t, s = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    visible = torch.stack([(s <= t) & ((t - s < WINDOW) | (s < sinks) | torch.tensor(not one)) for one in local])
    mask = torch.where(visible, 0.0, -torch.inf)[None]
    return logits(model, tokens, attention_mask=mask)


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
    assert torch.equal(logits(model, tokens), actual)


def test_window_and_sinks_can_be_overridden(tokens: Tensor) -> None:
    model = tiny_model()
    dense = logits(model, tokens)
    with layout_applied(model, LAYOUT, sinks=0):
        assert torch.equal(logits(model, tokens), logits(hybrid(replace(LAYOUT, sinks=0)), tokens))
        assert checkpoint_layout(model) == replace(LAYOUT, sinks=0)
    with layout_applied(model, LAYOUT, 2, 5):
        assert torch.equal(logits(model, tokens), logits(hybrid(replace(LAYOUT, window=2, sinks=5)), tokens))
    assert torch.equal(logits(model, tokens), dense)
    with pytest.raises(UserError, match="sinks is -1"):
        apply_layout(model, LAYOUT, sinks=-1)


def hybrid(layout: Layout) -> PreTrainedModel:
    model = tiny_model()
    apply_layout(model, layout)
    return model


def test_full_attention_lifts_and_restores_them(tokens: Tensor) -> None:
    """Also those of gates, whose windows a measurement may replace."""
    gated = tiny_model()
    attach_gates(gated, GateConfig(window=WINDOW, sinks=2, heads=["SG", "GL", "SL", "GG"]), seed=0)
    for model in (hybrid(LAYOUT), gated):
        before = [(state.windows, state.sinks, state.operator_sinks) for state in layer_states(model)]
        expected = logits(model, tokens)
        with full_attention(model) as states:
            assert [state.operator_sinks for state in states] == [0] * 4
            for state in states:
                state.windows = (WINDOW, WINDOW)
            assert torch.allclose(logits(model, tokens), masked(tiny_model(), tokens, 0, (True,) * 4), atol=1e-5)
        assert [(state.windows, state.sinks, state.operator_sinks) for state in layer_states(model)] == before
        assert torch.equal(logits(model, tokens), expected)


def test_a_local_head_of_gates_gets_none() -> None:
    """The operator's sinks are for layouts: gates keep their sink tokens themselves, and only where they decide."""
    model = tiny_model()
    attach_gates(model, GateConfig(window=WINDOW, sinks=2, heads=["GL", "GL", "GL", "SL"]), seed=0)
    assert [state.sinks for state in layer_states(model)] == [(2, 0)] * 4
    assert [state.operator_sinks for state in layer_states(model)] == [0] * 4


def test_layers_with_a_native_window_get_none() -> None:
    """They were trained without: in a layout, with every head local, and in the cache."""
    model = tiny_model("gemma3_text")
    apply_layout(model, LAYOUT)
    native = [state.native_window is not None for state in layer_states(model)]
    assert {*native} == {False, True}
    assert [state.operator_sinks for state in layer_states(model)] == [0 if one else 3 for one in native]
    assert [layer.local_sinks for layer in SPKVCache(model).layers] == [0 if one else 3 for one in native]
    with every_head_local(model, 2, 3):
        assert [state.operator_sinks for state in layer_states(model)] == [0 if one else 3 for one in native]


def test_scores_distinguish_them(blocks: TokenBlocks, tmp_path: Path) -> None:
    """Two layouts with the same windows had one score; scores on disk hold the layout with its sinks."""
    model = tiny_model(vocab_size=300)
    layouts = [replace(LAYOUT, sinks=number) for number in (0, 2, 4)]
    everything = Layout(("GG",) * 4, WINDOW, sinks=4)
    scores = zero_shot(model, [None, everything, *layouts], blocks, cache=tmp_path)
    assert len({score.mean for score in scores}) == 4
    assert scores[0].mean == scores[1].mean
    for layout, score in zip(layouts, scores[2:], strict=True):
        with layout_applied(model, layout):
            assert zero_shot(model, [layout], blocks)[0].mean == score.mean
    assert {layout.sinks for layout in kept_layouts(tmp_path)} >= {0, 2, 4}
    assert zero_shot(model, layouts[1:2], blocks, cache=tmp_path)[0].mean == scores[3].mean
