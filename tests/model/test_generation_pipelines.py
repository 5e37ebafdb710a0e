"""Test generation as users of transformers call it: ``generate`` and pipelines make the cache that a hybrid needs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from helpers import gated, logits, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, pipeline

from spkv_nas import (
    GateConfig,
    SPKVCache,
    apply_layout,
    attach_gates,
    detach,
    load,
    save,
    set_gate_mode,
)
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError

LAYOUT = Layout(("GL", "LL", "LG", "GG"), window=5)
GREEDY = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10, "pad_token_id": 0}


def hybrid() -> PreTrainedModel:
    model = tiny_model(vocab_size=300)
    apply_layout(model, LAYOUT)
    return model


def test_generate_creates_its_cache(tokens: Tensor) -> None:
    """No token is computed twice."""
    model = hybrid()
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[1])
    )
    made = model.generate(tokens, return_dict_in_generate=True, **GREEDY)
    assert isinstance(made.past_key_values, SPKVCache)
    assert seen == [24] + [1] * 9
    again = model.generate(tokens, use_cache=False, **GREEDY)
    assert seen[10:] == list(range(24, 34))
    assert torch.equal(made.sequences, again)
    detach(model)
    plain = model.generate(tokens, return_dict_in_generate=True, **GREEDY)
    assert isinstance(plain.past_key_values, DynamicCache)


def test_a_forward_pass_with_use_cache_gets_a_cache(tokens: Tensor) -> None:
    model = hybrid()
    with torch.no_grad():
        first = model(input_ids=tokens[:, :-1], use_cache=True)
        second = model(input_ids=tokens[:, -1:], past_key_values=first.past_key_values)
    assert torch.allclose(second.logits[:, -1], logits(model, tokens)[:, -1], atol=1e-5)
    assert model(input_ids=tokens).past_key_values is None
    with pytest.raises(UserError, match="no gradients pass through SPKVCache"):
        model(input_ids=tokens, use_cache=True)
    with pytest.raises(UserError, match="cannot use a DynamicCache"):
        model.generate(tokens, past_key_values=DynamicCache(), **GREEDY)


@pytest.mark.parametrize("make", [hybrid, gated])
def test_saved_models_generate_alike(
    make: object, tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Gates that may be soft keep all keys, so that their model computes without a cache by default."""
    model = make()  # type: ignore[operator]
    save(model, tiny_tokenizer, tmp_path)
    again, _ = load(tmp_path)
    for each in (model, again):
        made = each.generate(tokens, return_dict_in_generate=True, **GREEDY)
        assert isinstance(made.past_key_values, SPKVCache) == (make is hybrid)
        assert torch.equal(made.sequences, model.generate(tokens, use_cache=False, **GREEDY))
    if make is gated:
        set_gate_mode(again, "hard")
        with_cache = again.generate(tokens, past_key_values=SPKVCache(again), **GREEDY)
        assert torch.equal(with_cache, again.generate(tokens, use_cache=False, **GREEDY))
    detach(again)
    assert again.config.use_cache
    assert again.generation_config.use_cache


def test_a_pipeline(
    tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Prompts of several lengths, padded, work with the default cache."""
    model = hybrid()
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    prompts = ["the quick brown fox", "the dog jumps over the lazy fox and the fox"]
    options = {"do_sample": False, "max_new_tokens": 6}
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    both = generate(prompts, batch_size=2, **options)
    one = [generate(prompt, use_cache=False, **options) for prompt in prompts]
    assert both == one
    save(model, tokenizer, tmp_path)
    assert pipeline("text-generation", model=str(tmp_path))(prompts, **options) == one


@pytest.mark.parametrize(
    ("mode", "caches"), [("soft", False), ("sampled", False), ("open", True), ("hard", True)]
)
def test_gates_generate_with_a_cache_unless_they_are_soft(
    mode: str, caches: bool, tokens: Tensor
) -> None:
    """Hard gates computed the whole text again for every token."""
    model = gated()
    set_gate_mode(model, mode, 0.5)
    widths: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: widths.append(args[0].shape[1])
    )
    made = model.generate(tokens, return_dict_in_generate=True, **GREEDY)
    assert isinstance(made.past_key_values, SPKVCache) == caches
    assert (set(widths[1:]) == {1}) == caches
    if mode == "hard":
        assert torch.equal(made.sequences, model.generate(tokens, use_cache=False, **GREEDY))


def test_gates_that_no_cache_can_hold_generate_without(tokens: Tensor) -> None:
    model = tiny_model()
    attach_gates(model, GateConfig(window=8, predictor="bidirectional", kernel_size=3), seed=0)
    set_gate_mode(model, "hard")
    made = model.generate(tokens, return_dict_in_generate=True, **GREEDY)
    assert made.past_key_values is None
    with pytest.raises(UserError, match="needs future tokens: generate with use_cache=False"):
        SPKVCache(model)
