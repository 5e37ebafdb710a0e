"""Test caches that are used again: an empty one follows its model, a filled one is right or refused by what changed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from helpers import logits, scatter_gates, tiny_model
from marks import slow
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas import (
    GateConfig,
    Layout,
    SPKVCache,
    UserError,
    apply_layout,
    attach_gates,
    detach,
    layout_applied,
)
from spkv_nas.model.modes import gate_mode, set_gate_mode
from spkv_nas.model.windows import add_learned_sinks

LAYOUT = Layout(("GL", "LL", "LG", "GG"), 5, sinks=1)
OTHERS = {
    "layout": Layout(("LL", "GG", "LL", "LG"), 5, sinks=1),
    "window": Layout(("GL", "LL", "LG", "GG"), 7, sinks=1),
    "sinks": Layout(("GL", "LL", "LG", "GG"), 5),
    "windows": Layout(("GL", "MM", "LG", "GG"), windows={"L": 5, "M": 9}, sinks=1),
}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {},
    "youtu": LATENT,
}
MOST_FAMILIES = ["llama", slow("qwen3"), slow("mistral"), "gemma3_text", "youtu"]


def prompt(batch: int = 1, length: int = 30) -> Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(3))


def hybrid(family: str = "llama", layout: Layout = LAYOUT) -> PreTrainedModel:
    model = tiny_model(family, **FAMILIES[family]).double()
    apply_layout(model, of_family(family, layout))
    return model


def of_family(family: str, layout: Layout) -> Layout:
    """Return a layout with one letter per layer, the first, for a family whose heads share a latent."""
    if family != "youtu":
        return layout
    return Layout.from_windows([row[:1] for row in layout.head_windows], sinks=layout.sinks)


def gated(tau: float = 0.5) -> PreTrainedModel:
    model = tiny_model().double()
    attach_gates(model, GateConfig(window=5, bias=0.0), seed=0)
    scatter_gates(model)
    set_gate_mode(model, "hard", tau)
    return model


@torch.no_grad()
def fill(model: PreTrainedModel, tokens: Tensor) -> SPKVCache:
    cache = SPKVCache(model)
    model(input_ids=tokens, past_key_values=cache)
    return cache


@torch.no_grad()
def step(model: PreTrainedModel, cache: SPKVCache, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens, past_key_values=cache).logits
    return found


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-5 * expected.abs().max())


@pytest.mark.parametrize(
    ("other", "family"),
    [
        *((other, "llama") for other in OTHERS),
        *(("windows", family) for family in ("mistral", "gemma3_text")),
        ("layout", "youtu"),
    ],
)
def test_another_layout(other: str, family: str) -> None:
    """A filled cache is refused; an empty one, made before the layout or reset, has the logits of the new layout."""
    model, tokens = hybrid(family), prompt()
    made_before, filled = SPKVCache(model), fill(model, tokens[:, :20])
    apply_layout(model, of_family(family, OTHERS[other]))
    with pytest.raises(UserError, match="past_key_values was filled under another layout"):
        step(model, filled, tokens[:, 20:])
    filled.reset()
    expected = logits(model, tokens)
    for cache in (made_before, filled):
        parts = [step(model, cache, part) for part in tokens.split([20, 9, 1], 1)]
        assert close(torch.cat(parts, 1), expected)
        assert cache.num_bytes == fill(model, tokens).num_bytes


class TestChangesBetweenCalls:
    def test_the_same_layout_again(self) -> None:
        """Its keys are the same: after ``detach`` and ``apply_layout``, and after a block with another layout."""
        model, tokens = hybrid(), prompt()
        expected, cache = logits(model, tokens), fill(model, tokens[:, :10])
        detach(model)
        apply_layout(model, LAYOUT)
        found = [step(model, cache, tokens[:, 10:20])]
        with (
            layout_applied(model, OTHERS["layout"]),
            pytest.raises(UserError, match="under another layout"),
        ):
            step(model, cache, tokens[:, 20:])
        found.append(step(model, cache, tokens[:, 20:]))
        assert close(torch.cat(found, 1), expected[:, 10:])

    @pytest.mark.parametrize("family", MOST_FAMILIES)
    def test_a_dense_model(self, family: str) -> None:
        """It saw none of the keys, at its first token without an error."""
        model, tokens = hybrid(family), prompt()
        filled, empty = fill(model, tokens), SPKVCache(model)
        detach(model)
        for cache in (filled, empty):
            with pytest.raises(
                UserError,
                match="past_key_values is an SPKVCache, but this model has no gates or layout",
            ):
                step(model, cache, tokens[:, :1])

    def test_a_threshold_a_mode_and_new_gates(self) -> None:
        model, tokens = gated(), prompt()
        expected, cache = logits(model, tokens), fill(model, tokens[:, :20])

        def refused() -> None:
            with pytest.raises(UserError, match="gate mode or tau, than the model has now"):
                step(model, cache, tokens[:, 20:])

        with gate_mode(model, "hard", 0.9):
            refused()
        with gate_mode(model, "open"):
            refused()
        assert close(step(model, cache, tokens[:, 20:]), expected[:, 20:])
        detach(model)
        attach_gates(model, GateConfig(window=5, bias=0.0), seed=1)
        set_gate_mode(model, "hard", 0.5)
        refused()

    def test_learned_sinks(self) -> None:
        model = hybrid()
        cache = fill(model, prompt())
        add_learned_sinks(model)
        with pytest.raises(UserError, match="under another layout"):
            step(model, cache, prompt(1, 1))

    def test_another_model(self) -> None:
        """One of as many layers and heads has other keys; an empty cache serves any model."""
        model, tokens = hybrid(), prompt()
        others = [hybrid("qwen3"), copy.deepcopy(model), tiny_model(num_hidden_layers=2)]
        apply_layout(others[2], Layout(("GL", "LL"), 9))
        for other in others:
            cache = fill(model, tokens[:, :20])
            with pytest.raises(UserError, match="was filled by another model"):
                step(other, cache, tokens[:, 20:])
            cache.reset()
            assert close(step(other, cache, tokens), logits(other, tokens))

    def test_another_batch(self) -> None:
        model, tokens = hybrid(), prompt(3)
        cache = fill(model, tokens)
        for batch in (1, 2):
            with pytest.raises(UserError, match=f"holds 3 sequences, this batch has {batch}"):
                step(model, cache, tokens[:batch])
        cache.reset()
        assert close(step(model, cache, tokens[:1]), logits(model, tokens[:1]))

    def test_another_dtype(self) -> None:
        model, tokens = hybrid(), prompt()
        cache = fill(model, tokens[:, :20])
        model.float()
        with pytest.raises(
            UserError, match=r"holds keys in torch\.float64 on cpu, but this call computes in"
        ):
            step(model, cache, tokens[:, 20:])

    def test_an_interrupted_call(self) -> None:
        """Some layers had stored its tokens, and the next call computed from them."""
        model, tokens = hybrid(), prompt()
        expected = logits(model, tokens)
        for layer in model.model.layers[1], model.model.layers[1].mlp:
            filled, empty = fill(model, tokens[:, :20]), SPKVCache(model)
            handle = layer.register_forward_pre_hook(interrupt)
            for cache in (filled, empty):
                with pytest.raises(KeyboardInterrupt):
                    step(model, cache, tokens[:, 20:])
            handle.remove()
            for cache in (filled, empty):
                with pytest.raises(UserError, match="was left by a call that was interrupted"):
                    step(model, cache, tokens[:, 20:])
                cache.reset()
                assert close(step(model, cache, tokens), expected)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class TestRows:
    @pytest.mark.parametrize("family", MOST_FAMILIES)
    def test_chosen_rows(self, family: str) -> None:
        """By numbers, by a mask and repeated, as with a cache of transformers."""
        model, tokens = hybrid(family), prompt(3)
        expected = logits(model, tokens)
        changes: dict[str, tuple[Callable[[SPKVCache], None], list[int]]] = {
            "numbers": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
            "a list": (lambda cache: cache.batch_select_indices([1]), [1]),
            "a mask": (
                lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
                [0, 2],
            ),
            "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
            "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        }
        for change, rows in changes.values():
            cache = fill(model, tokens[:, :20])
            change(cache)
            assert close(step(model, cache, tokens[rows, 20:]), expected[rows, 20:])

    def test_cropping(self) -> None:
        """Nothing is no error, as with a cache of transformers."""
        model, tokens = hybrid(), prompt()
        cache, expected = fill(model, tokens[:, :20]), logits(model, tokens)
        cache.crop(0)
        for number in (-1, -20, 5):
            with pytest.raises(UserError, match="cannot be cropped"):
                cache.crop(number)
        assert close(step(model, cache, tokens[:, 20:]), expected[:, 20:])

    def test_copies(self) -> None:
        """A copy goes on from the same tokens, also one from a file, with any model like that which filled it."""
        model, tokens = hybrid(), prompt()
        cache, expected = fill(model, tokens[:, :20]), logits(model, tokens)
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for copied in (copy.deepcopy(cache), loaded):
            assert close(step(model, copied, tokens[:, 20:]), expected[:, 20:])
        file.seek(0)
        other = hybrid(layout=OTHERS["window"])
        with pytest.raises(UserError, match="under another layout"):
            step(other, torch.load(file, weights_only=False), tokens[:, 20:])
