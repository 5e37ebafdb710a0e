"""Test hybrids of families whose layers store more than keys and values: with the cache they equal whole passes."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import FAMILIES, SLOW
from helpers import (
    equal_up_to_rounding,
    logits,
    recompute_activations,
    save_with_tokenizer,
    tiny_model,
)
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import GateConfig, SPKVCache, apply_layout, attach_gates, detach, set_gate_mode
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.model import attach
from spkv_nas.model.attention import (
    LayerState,
    hooked_layers,
    layer_predictor,
    layer_state,
    layer_states,
)
from spkv_nas.model.checkpoint import load
from spkv_nas.model.custom_model_type import native_class
from spkv_nas.model.gates import predictors
from spkv_nas.model.model_shape import config_shape

IGNORES_STATES = {"jamba", "zamba"}  # where several tokens follow those in a cache
ALL = [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]


def hybrid(family: str, **changes: Any) -> PreTrainedModel:
    """Return a model with mixed heads, whose attention is far from uniform, without an end-of-text token."""
    model = tiny_model(family, **({**FAMILIES, **SLOW}[family] | changes))
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and any(part in name for part in ("attn", "mixer", "mamba")):
                parameter *= 6
    attach.hook_layers(model)
    heads = [state.num_kv_heads for state in layer_states(model)]
    rows = tuple(
        "".join("GL"[(layer + head) % 2] for head in range(n)) for layer, n in enumerate(heads)
    )
    apply_layout(model, Layout(rows, 5, sinks=1))
    return model


def explicit_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, scaling: float | None = None, **__: Any
) -> tuple[Tensor, None]:
    """Attend under an additive mask for each KV head: q [B, Hq, T, D], k and v [B, Hkv, T, D]."""
    age = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    masks = []
    for window, sinks in zip(module.expected.windows, module.expected.sinks, strict=True):
        is_visible = (age >= 0) & ((age < window) | (torch.arange(k.shape[2]) < sinks))
        masks.append(torch.zeros_like(age, dtype=q.dtype).masked_fill(~is_visible, -torch.inf))
    mask = torch.stack(masks)
    if (
        gate := getattr(module, "expected_gate", None)
    ) is not None:  # of keys outside the window [B, Hkv, T]
        mask = torch.where(age >= module.expected.windows[0], gate.to(q.dtype)[..., None, :], mask)
    group = q.shape[1] // k.shape[1]
    k, v, mask = (x.repeat_interleave(group, dim=-3) for x in (k, v, mask))
    scores = q @ k.mT * (scaling or q.shape[-1] ** -0.5) + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


AttentionInterface.register("explicit", explicit_attention)


@contextmanager
def explicit_gates(model: PreTrainedModel, mode: str) -> Iterator[None]:
    """Attend under an explicit bias of the gates, the same in a layer and in those that read its keys."""
    with attach.restored(model), ExitStack() as hooks:
        layers = {
            layer: (layer_state(layer), layer_predictor(layer))
            for layer in hooked_layers(model).values()
        }
        detach(model)
        gates: dict[int, Tensor] = {}
        for layer, (state, predictor) in layers.items():

            def compute(
                module: Any, args: Any, kwargs: Any, state: Any = state, predictor: Any = predictor
            ) -> None:
                if predictor is not None:
                    u = predictor(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
                    gates[id(state)] = (
                        logsigmoid(u) if mode == "soft" else torch.where(u >= 0, 0.0, -torch.inf)
                    )
                module.expected_gate = gates.get(id(state))
                is_gated = module.expected_gate is not None
                windows = state.head_windows(gated=is_gated)
                module.expected = replace(state, windows=windows, sinks=(0,) * len(windows))

            hooks.callback(layer.register_forward_pre_hook(compute, with_kwargs=True).remove)
        model.set_attn_implementation("explicit")
        yield


def prompts(length: int = 20) -> Tensor:
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))


def error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("family", ALL)
def test_whole_passes_equal_an_explicit_mask(family: str) -> None:
    model = hybrid(family).double()
    model.set_experts_implementation("eager")  # others take no float64
    actual = logits(model, prompts())
    states: dict[nn.Module, LayerState] = {
        module: copy.copy(module.spkv)  # type: ignore[misc]
        for module in model.modules()
        if hasattr(module, "spkv")
    }
    detach(model)
    for module, state in states.items():
        module.expected = state  # type: ignore[assignment]
    model.set_attn_implementation("explicit")
    assert error(actual, logits(model, prompts())) < 1e-4


@pytest.mark.parametrize("family", ALL)
def test_generation_equals_whole_passes(family: str) -> None:
    """Greedily, with left padding, from a prompt in chunks, with beams, and from copies of a prompt's cache."""
    model, ids, mask = hybrid(family), prompts(), torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    record: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    made = model.generate(
        ids, past_key_values=SPKVCache(model), max_new_tokens=12, **record, **options
    )
    for row, start in enumerate((0, 7)):
        sequence = made.sequences[row : row + 1, start:]
        expected = logits(model, sequence[:, :-1])[0, 19 - start :]
        assert error(torch.stack(made.logits, 1)[row], expected) < 1e-4
        assert torch.equal(sequence[0, 20 - start :], expected.argmax(-1))
    # Beams
    options |= {"attention_mask": torch.ones_like(mask), "max_new_tokens": 5}
    beams = [
        model.generate(ids, num_beams=3, use_cache=uses_cache, **options)
        for uses_cache in (True, False)
    ]
    assert torch.equal(*beams)
    # Chunks, and copies of a prompt's cache
    chunked = {**options, "prefill_chunk_size": 6}
    if family in IGNORES_STATES:
        with pytest.raises(UserError, match="ignore their states where several tokens follow"):
            model.generate(ids, past_key_values=SPKVCache(model), **chunked)
        return
    whole = model.generate(ids, past_key_values=SPKVCache(model), **options)
    assert torch.equal(model.generate(ids, past_key_values=SPKVCache(model), **chunked), whole)
    cache, positions = SPKVCache(model), torch.arange(20)[None]
    with torch.no_grad():
        model(input_ids=ids[:1, :12], past_key_values=cache)
        copied = copy.deepcopy(cache)
        copied.batch_repeat_interleave(2)
        actual = model(
            input_ids=ids[:, 12:], past_key_values=copied, position_ids=positions[:, 12:]
        ).logits
    joined = torch.cat([ids[:1, :12].expand(2, -1), ids[:, 12:]], 1)
    assert error(actual, logits(model, joined)[:, 12:]) < 1e-4


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "mistral"])
def test_bytes_are_those_of_the_plan(family: str) -> None:
    model = hybrid(family, head_dim=64, hidden_size=256)
    cache, states = SPKVCache(model, page_size=4), layer_states(model)
    with torch.no_grad():
        for tokens in torch.full((1, 100), 5).split([80, *[1] * 20], 1):
            model(input_ids=tokens, past_key_values=cache)
    planned = CacheCost(
        100, 1, 5, head_dim=64, dtype="float32", sinks=1, global_window=states[0].checkpoint_window
    )
    windows = [
        None if w == state.checkpoint_window else w for state in states for w in state.windows or ()
    ]
    assert config_shape(model.config).num_layers == len(states)
    assert planned.of_heads(windows) < cache.num_bytes < 1.1 * planned.of_heads(windows)


def test_states_outside_of_the_cache_are_refused() -> None:
    model = tiny_model("recurrent_gemma", head_dim=8, attention_window_size=12, lru_width=32)
    apply_layout(model, Layout(("LL",), 5))
    with pytest.raises(UserError, match="keeps states outside of its cache"):
        model.generate(prompts(), attention_mask=torch.ones(2, 20), max_new_tokens=2)


@pytest.mark.parametrize(
    "family", ["nemotron_h", *(pytest.param(f, marks=pytest.mark.slow) for f in ("lfm2", "zamba2"))]
)
def test_hybrids_are_saved_and_loaded(
    family: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Nemotron-H lists the kinds of its layers, not their number; its own config class refuses the file."""
    model = hybrid(family)
    save_with_tokenizer(model, tiny_tokenizer, tmp_path)
    assert equal_up_to_rounding(logits(load(tmp_path)[0], prompts()), logits(model, prompts()))
    with pytest.raises(StrictDataclassFieldValidationError, match=r"spkv_nas\.load"):
        native_class(model.config).from_pretrained(tmp_path)


def test_layers_that_share_keys_are_one_choice(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A layout has a row for each layer with keys of its own, which a saved hybrid restores."""
    model = hybrid("gemma4_text")
    assert (len(layer_states(model)), config_shape(model.config).num_layers) == (4, 4)
    expected = logits(model, prompts())
    save_with_tokenizer(model, tiny_tokenizer, tmp_path)
    restored, _ = load(tmp_path)
    assert equal_up_to_rounding(logits(restored, prompts()), expected)
    cache = SPKVCache(model)
    with torch.no_grad():
        model(input_ids=prompts(), past_key_values=cache)
    # Sequences, tokens, K and V, layers, heads, size
    assert cache.full_attention_bytes == 2 * 20 * 2 * 4 * 2 * 8 * 4
    layout = Layout(("GL",) * 4, 3)
    with attach.restored(model):
        apply_layout(model, layout)
    assert equal_up_to_rounding(logits(model, prompts()), expected)
    detach(model)
    assert not any(hasattr(module, "spkv") for module in model.modules())


@pytest.mark.parametrize(
    "family", ["gemma4_text", "youtu", pytest.param("gemma3n_text", marks=pytest.mark.slow)]
)
def test_gates_of_shared_keys(family: str) -> None:
    """They equal an explicit bias in all layers and heads that share them, also recomputed, and with the cache."""
    model = hybrid(family)
    attach_gates(model, GateConfig(window=5, sinks=1, bias=0.0, init_scale=40.0), seed=0)
    # Generate with hard gates
    options: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
    set_gate_mode(model, "hard")
    cached = model.generate(prompts(), past_key_values=SPKVCache(model), **options)
    assert torch.equal(cached, model.generate(prompts(), use_cache=False, **options))
    set_gate_mode(model, "open")
    assert not torch.equal(cached, model.generate(prompts(), use_cache=False, **options))
    # Compare logits with those of an explicit bias, and gradients of the predictors, also with recomputed activations
    model.double().train()
    weights = [p for module in predictors(model).values() for p in module.parameters()]
    for mode in ("hard", "soft"):
        set_gate_mode(model, mode)
        logits = model(input_ids=prompts(), use_cache=False).logits
        with explicit_gates(model, mode):
            expected = model(input_ids=prompts(), use_cache=False).logits
        assert error(logits, expected) < 1e-6
    slopes = torch.autograd.grad(expected.square().mean(), weights)
    recompute_activations(model)
    recomputed = model(input_ids=prompts(), use_cache=False).logits
    for outputs in (logits, recomputed):
        actual = torch.autograd.grad(outputs.square().mean(), weights)
        assert all(error(x, y) < 1e-5 for x, y in zip(actual, slopes, strict=True))
