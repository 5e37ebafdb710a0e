"""Test generation with the paged cache: logits and text equal those of whole forward passes with the same gates."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny_model
from marks import slow
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import GateConfig, SPKVCache, UserError, apply_layout, attach_gates, set_gate_mode
from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.gates import predictors
from spkv_nas.model.generation import continue_greedily
from spkv_nas.model.generation import generate as generate_text

LENGTHS = (5, 31, 12, 1, 24)
NEW = 12  # tokens, with which some rows begin a page of 16


def model_with(kind: str, family: str = "llama") -> PreTrainedModel:
    """Make a tiny model with window 6: hard gates, gates that keep only sinks, a mixed layout, or whole layers.

    The kinds "mixed+4" and "windows+4" have 4 sink tokens, the latter with windows of 6, 9 and 14.
    """
    heads = (
        {"num_attention_heads": 8, "num_key_value_heads": 4} if kind.startswith("windows") else {}
    )
    model = tiny_model(family, max_position_embeddings=4096, **heads)
    model.generation_config.eos_token_id = None
    if kind == "gates":
        attach_gates(model, GateConfig(window=6, bias=0.0), seed=0)
        for predictor in predictors(model).values():
            torch.nn.init.normal_(predictor.down.weight, std=2.0)
        set_gate_mode(model, "hard", 0.5)
    elif kind == "sinks":
        attach_gates(
            model, GateConfig(window=6, bias=-3.0, sinks=3, heads=["SS", "SL", "GG", "LS"]), seed=0
        )
        set_gate_mode(model, "hard", 0.5)
    elif kind.startswith("mixed"):
        apply_layout(
            model, Layout(("GL", "LL", "GG", "LG"), 6, sinks=int(kind.partition("+")[2] or 0))
        )
    elif kind.startswith("windows"):
        legend = {"L": 6, "M": 9, "N": 14}
        sinks = int(kind.partition("+")[2])
        apply_layout(model, Layout(("NLGM", "LLLL", "GMNG", "MGLM"), windows=legend, sinks=sinks))
    else:
        apply_layout(model, Layout(("GG", "LL", "GG", "LL"), 6))
    return model


def prompts(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return (ids, mask) of five prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    return ids.masked_fill(~mask, 0), mask.long()


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: object) -> Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=mask, **options)


def whole_pass(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in ("gates", "sinks", "mixed", "mixed+4", "windows+4")),
        ("qwen3", "layers"),
        ("gpt_oss", "windows+1"),  # with learned sinks
        ("gemma3_text", "gates"),
        *(slow(("llama", kind)) for kind in ("layers", "mixed+1")),
        *(slow(("qwen3", kind)) for kind in ("gates", "sinks", "mixed", "windows+1")),
        *(slow((family, "gates")) for family in ("phi3", "granite")),
    ],
)
def test_greedy_text_and_logits_of_ragged_prompts(family: str, kind: str) -> None:
    model = model_with(kind, family)
    ids, mask = prompts()
    actual = generate(
        model,
        ids,
        mask,
        past_key_values=SPKVCache(model),
        return_dict_in_generate=True,
        output_logits=True,
    )
    for row, length in enumerate(LENGTHS):
        text = actual.sequences[row, max(LENGTHS) - length :]
        expected = whole_pass(model, text[None, :-1])[0, length - 1 :]
        logits = torch.stack(actual.logits, 1)[row]
        assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))
        assert torch.equal(text[length:], expected.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["gates", "mixed"])
def test_two_thousand_tokens(kind: str, family: str) -> None:
    model = model_with(kind, family)
    ids, mask = prompts()
    cache = SPKVCache(model)
    actual = generate(
        model,
        ids,
        mask,
        past_key_values=cache,
        max_new_tokens=2000,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for row, length in enumerate(LENGTHS):
        text = actual.sequences[row, max(LENGTHS) - length :]
        expected = whole_pass(model, text[None, :-1])[0, length - 1 :]
        logits = torch.stack([step[row] for step in actual.logits])
        assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))
    assert cache.num_bytes < cache.full_attention_bytes


@pytest.mark.parametrize("kind", ["gates", "windows+4"])
def test_chunked_prefill(kind: str) -> None:
    model = model_with(kind)
    ids, mask = prompts()
    expected = generate(model, ids, mask, past_key_values=SPKVCache(model))
    assert torch.equal(
        generate(model, ids, mask, past_key_values=SPKVCache(model), prefill_chunk_size=7), expected
    )


@pytest.mark.parametrize("kind", ["gates", "mixed+4"])
def test_a_conversation_continues(kind: str) -> None:
    """All tokens so far are passed with the same cache; cached ones are not computed again."""
    model = model_with(kind)
    ids, mask = prompts()
    cache = SPKVCache(model)
    first = generate(model, ids, mask, past_key_values=cache)
    turn = torch.randint(3, 97, (len(LENGTHS), 9), generator=torch.Generator().manual_seed(1))
    ids, mask = torch.cat([first, turn], 1), torch.nn.functional.pad(mask, (0, NEW + 9), value=1)
    result = generate(model, ids, mask, past_key_values=cache)
    assert torch.equal(result, generate(model, ids, mask, past_key_values=SPKVCache(model)))
    assert cache.get_seq_length() == result.shape[1] - 1


@pytest.mark.parametrize("kind", ["gates", "windows+4"])
def test_beam_search(kind: str) -> None:
    model = model_with(kind)
    ids, mask = prompts()
    result = generate(model, ids, mask, past_key_values=SPKVCache(model), num_beams=3)
    model.generation_config.use_cache = False
    assert torch.equal(
        result[0, -NEW:], generate(model, ids[:1, -5:], mask[:1, -5:], num_beams=3)[0, -NEW:]
    )


def test_sampling_repeats_with_its_seed() -> None:
    model = model_with("mixed")
    ids, mask = prompts()
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        cache = SPKVCache(model)
        texts.append(
            generate(
                model, ids, mask, past_key_values=cache, do_sample=True, num_return_sequences=2
            )
        )
    assert texts[0].shape[0] == 10
    assert torch.equal(*texts)


def test_savings_of_the_cache() -> None:
    model = model_with("layers")
    cache = SPKVCache(model, page_size=4)
    assert cache.density != cache.density
    ids = torch.randint(3, 97, (2, 400), generator=torch.Generator().manual_seed(0))
    generate(model, ids, torch.ones_like(ids), past_key_values=cache)
    assert cache.density == 0.5
    assert 0.5 * cache.full_attention_bytes < cache.num_bytes < 0.65 * cache.full_attention_bytes


@pytest.mark.parametrize(("sinks", "length"), [(1, 50), (4, 50), (4, 8), (4, 3)])
def test_stored_sink_tokens(sinks: int, length: int) -> None:
    """A local head stores its window of 6 and those sink tokens that have left it."""
    model = tiny_model()
    apply_layout(model, Layout(("LL", "LL", "GL", "LL"), 6, sinks=sinks))
    cache = SPKVCache(model, page_size=1)
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    beyond = max(0, length - 6)
    stored = 7 * min(sinks, beyond) + beyond
    lengths = [int(layer.paged[0].lengths.sum()) for layer in cache.layers]
    assert lengths.count(4 * min(sinks, beyond)) == 3 + (beyond <= sinks)
    assert (
        cache.density == pytest.approx(stored / (8 * beyond), nan_ok=True)
        if beyond
        else cache.density != 0
    )


def test_tau_is_a_dial() -> None:
    model = model_with("gates")
    ids, mask = prompts()
    densities = []
    for tau in (0.1, 0.5, 0.9):
        set_gate_mode(model, "hard", tau)
        cache = SPKVCache(model)
        generate(model, ids, mask, past_key_values=cache)
        densities.append(cache.density)
    assert densities[0] > densities[1] > densities[2]


@pytest.mark.parametrize("kind", ["gates", "layers"])
def test_classes_that_name_their_cache_otherwise(kind: str) -> None:
    """GPT-NeoX passes its cache to attention as ``layer_past``."""
    model = tiny_model("gpt_neox", num_key_value_heads=None, max_position_embeddings=4096)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.ndim > 1 else 1.0)  # so that tokens differ
    if kind == "gates":
        attach_gates(model, GateConfig(window=6, bias=0.0), seed=0)
        set_gate_mode(model, "hard", 0.5)
    else:
        apply_layout(model, Layout(("GGLL", "LLLL", "GGGG", "LLLL"), 6))
    ids = prompts()[0][1:2]
    cache = SPKVCache(model)
    text = generate(model, ids, torch.ones_like(ids), past_key_values=cache)
    assert cache.get_seq_length() == text.shape[1] - 1
    assert torch.equal(
        text[0, ids.shape[1] :], whole_pass(model, text[:, :-1])[0, ids.shape[1] - 1 :].argmax(-1)
    )


def test_greedy_decoding_ignores_the_checkpoints_preferences(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Chat models come with a penalty for repeated tokens, which would not give the most probable continuation."""
    model = tiny_model(vocab_size=300)
    apply_layout(model, Layout(("GG", "LL", "GG", "LL"), 6))
    texts = []
    for penalty in (1.0, 5.0):
        model.generation_config.repetition_penalty = penalty
        prompt = "the quick brown fox"
        generated = generate_text(model, tiny_tokenizer, prompt, max_new_tokens=12).text
        assert continue_greedily(model, tiny_tokenizer, [prompt], [12]).texts == [generated]
        texts.append(generated)
        assert model.generation_config.repetition_penalty == penalty
    assert texts[0] == texts[1]


def test_sizes_of_a_cache_that_the_model_replaces(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """Sizes were those of the first cache: Phi-3 fills a new one where its RoPE changes."""
    model = tiny_model("phi3", vocab_size=300, original_max_position_embeddings=12)
    model.generation_config.eos_token_id = 299
    apply_layout(model, Layout(("GL", "LL", "LG", "LL"), 5))
    made = generate_text(model, tiny_tokenizer, "the fox", max_new_tokens=20)
    seen = made.num_prompt_tokens + made.num_new_tokens - 1
    assert made.num_prompt_tokens < 12 < seen
    # Keys and values, layers, KV heads, size, float32
    assert made.full_attention_bytes == seen * 2 * 4 * 2 * 8 * 4
    long = "the quick brown fox jumps over the lazy dog and the fox"  # the first pass replaces the cache
    continued = continue_greedily(model, tiny_tokenizer, [long], [3])
    assert continued.densities == pytest.approx([2 / 8])


class TestRefused:
    def test_keys_that_do_not_reach_the_cache(self) -> None:
        model = model_with("layers")
        layer = SPKVCache(model).layers[0]
        keys = torch.zeros(1, 2, 3, 8)
        layer.expect_update()
        layer.update(keys, keys)
        layer.expect_update()
        with pytest.raises(UserError, match="SPKVCache misses keys"):
            layer.update(keys, keys)

    def test_a_cache_of_transformers(self) -> None:
        model = model_with("gates")
        ids, mask = prompts()
        with pytest.raises(UserError, match=r"past_key_values=spkv_nas\.SPKVCache\(model\)"):
            generate(model, ids, mask, past_key_values=DynamicCache(), use_cache=True)

    def test_a_cache_of_older_versions(self) -> None:
        """It ended in an AttributeError."""
        with pytest.raises(UserError, match="cannot use a tuple"):
            model_with("layers")(input_ids=torch.full((1, 3), 5), past_key_values=())

    @pytest.mark.parametrize("with_cache", [False, True])
    @pytest.mark.parametrize("how", ["assistant_model", "prompt_lookup_num_tokens"])
    def test_assisted_decoding(self, how: str, with_cache: bool) -> None:
        """Without a cache it was refused with "assisted decoding requires a cache"."""
        model = model_with("layers")
        options: dict[str, object] = {how: tiny_model() if how == "assistant_model" else 2}
        if with_cache:
            options["past_key_values"] = SPKVCache(model)
        ids = prompts()[0][1:2]
        with pytest.raises(
            UserError, match="assisted decoding, also by prompt lookup or early exit, needs a full-"
        ):
            generate(model, ids, torch.ones_like(ids), **options)

    def test_caches_that_generate_would_create(self) -> None:
        """The choice was ignored with a message that the model supports no caches."""
        model = model_with("layers")
        ids = prompts()[0][1:2]
        with pytest.warns(
            UserWarning, match="cache_implementation 'static' is ignored: this model uses SPKVCache"
        ):
            text = generate(model, ids, torch.ones_like(ids), cache_implementation="static")
        assert torch.equal(text, generate(model, ids, torch.ones_like(ids)))

    def test_soft_gates(self) -> None:
        model = model_with("gates")
        set_gate_mode(model, "soft")
        with pytest.raises(UserError, match=r'set_gate_mode\(model, "hard"\)'):
            generate(model, *prompts(), past_key_values=SPKVCache(model))

    def test_more_tokens_than_the_model_window(self) -> None:
        """Cached gates do not reach beyond the model's own window."""
        model = tiny_model("mistral", sliding_window=10)
        attach_gates(model, GateConfig(window=6), seed=0)
        model.generation_config.eos_token_id = None
        ids = prompts()[0][1:2, :8]
        for mode in ("hard", "open"):
            set_gate_mode(model, mode)
            generate(
                model, ids, torch.ones_like(ids), past_key_values=SPKVCache(model), max_new_tokens=3
            )
            with pytest.raises(
                UserError,
                match="sliding window of 10 keys is shorter than the sequence of 11 tokens",
            ):
                generate(
                    model,
                    ids,
                    torch.ones_like(ids),
                    past_key_values=SPKVCache(model),
                    max_new_tokens=4,
                )

    def test_a_predictor_that_looks_ahead(self) -> None:
        model = tiny_model()
        attach_gates(model, GateConfig(window=6, predictor="bidirectional", kernel_size=5))
        set_gate_mode(model, "hard")
        with pytest.raises(UserError, match="needs future tokens"):
            generate(model, *prompts(), past_key_values=SPKVCache(model))

    def test_a_model_without_gates_or_layout(self) -> None:
        with pytest.raises(UserError, match="neither gates nor a layout"):
            SPKVCache(tiny_model())

    def test_another_batch_size(self) -> None:
        model = model_with("gates")
        ids, mask = prompts()
        cache = SPKVCache(model)
        generate(model, ids, mask, past_key_values=cache)
        longer = torch.nn.functional.pad(ids[:2], (0, 30), value=5)
        with pytest.raises(UserError, match="holds 5 sequences, this batch has 2"):
            generate(model, longer, torch.ones_like(longer), past_key_values=cache)

    def test_cutting_back(self) -> None:
        model = model_with("gates")
        cache = SPKVCache(model)
        generate(model, *prompts(), past_key_values=cache)
        with pytest.raises(UserError, match="cannot be cropped"):
            cache.crop(-2)

    def test_no_cache_with_a_cache(self) -> None:
        model = model_with("gates")
        with pytest.raises(UserError, match="would store every token twice"):
            generate(model, *prompts(), past_key_values=SPKVCache(model), use_cache=False)
