"""Test inputs of a hooked model: each means what it says, with and without a cache, or is refused by its name."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from family_cases import FAMILIES, SLOW, STATES
from helpers import recompute_activations, sharpen_attention, tiny_model
from marks import pairwise, slow
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import GateConfig, Layout, SPKVCache, UserError, apply_layout, attach_gates, detach
from spkv_nas.model import attach
from spkv_nas.model.attention import layer_states

LENGTHS = [6, 1, 9, 4]
TOTAL = sum(LENGTHS)
RESTARTING = torch.cat([torch.arange(length) for length in LENGTHS])[None]
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0)
INDEX = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None]
GAP = torch.cat([torch.arange(8), torch.arange(30, 42)])[None]
GREEDY: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
STRIDED = 2 * torch.arange(TOTAL)[None]
KINDS: dict[str, dict[str, Any]] = {  # with other masks; Qwen3's are those of Llama
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {},
    "youtu": FAMILIES["youtu"],
}
MOST_KINDS = [slow(kind) if kind == "qwen3" else kind for kind in KINDS]


def tokens(batch: int = 1) -> Tensor:
    return torch.randint(3, 97, (batch, TOTAL), generator=torch.Generator().manual_seed(5))


def hybrid(
    family: str = "llama", letters: str = "GL", dtype: torch.dtype = torch.float64, **options: Any
) -> PreTrainedModel:
    model = sharpen_attention(tiny_model(family, **KINDS.get(family, options)), 4.0).to(dtype)
    attach.hook_layers(model)
    heads = [state.num_kv_heads for state in layer_states(model)]
    rows = tuple(
        "".join(letters[(layer + head) % len(letters)] for head in range(n))
        for layer, n in enumerate(heads)
    )
    apply_layout(model, Layout(rows, 5, sinks=1))
    return model


@lru_cache
def same_hybrid() -> PreTrainedModel:
    """Make the model for tests that only call it."""
    return hybrid()


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    found: Tensor = model(input_ids=ids, **{"use_cache": False, **inputs}).logits
    return found


def close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-5 * expected.abs().max())


class TestMasks:
    @pytest.mark.parametrize("with_cache", [False, True])
    @pytest.mark.parametrize(
        ("values", "held"),
        [
            ([1] * 8 + [2] * 12, "2"),
            ([3] * 20, "3"),
            ([1] * 19 + [-1], "-1"),
            ([0.0] * 19 + [-float("inf")], "-inf"),
            ([0.0] * 19 + [torch.finfo(torch.float32).min], "-3.4"),
            ([0.5] * 20, "0.5"),
            ([float("nan")] * 20, "nan"),
        ],
    )
    def test_other_values(self, values: list[float], held: str, with_cache: bool) -> None:
        """Numbers of documents made them see each other, and a mask to be added was read as its opposite."""
        with pytest.raises(
            UserError, match=f"attention_mask holds {held}.*, but 1 says a token and 0 padding"
        ):
            logits(
                same_hybrid(),
                tokens(),
                attention_mask=torch.tensor([values]),
                use_cache=with_cache,
            )

    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            (torch.zeros(2, TOTAL), r"only 0\.0, which says that every token is padding"),
            (torch.ones(2, 1, TOTAL, TOTAL), "attention_mask is an attention mask of its own"),
            (torch.ones(2, TOTAL, TOTAL), "attention_mask is an attention mask of its own"),
            (
                {"full_attention": torch.ones(2, TOTAL, dtype=torch.long)},
                "attention_mask is an attention mask of its own",
            ),
            ([[1] * TOTAL] * 2, "attention_mask is an attention mask of its own"),
            (torch.ones(1, TOTAL), "attention_mask has 1 rows for 2 sequences"),
            (torch.ones(2, TOTAL - 1), f"attention_mask has {TOTAL - 1} columns"),
        ],
    )
    def test_other_shapes(self, mask: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            logits(same_hybrid(), tokens(2), attention_mask=mask)

    @pytest.mark.parametrize("family", MOST_KINDS)
    def test_ones_and_zeros_of_any_dtype(self, family: str) -> None:
        """Each row has the logits that it has alone."""
        model, ids = hybrid(family), tokens(2)
        whole, padded = logits(model, ids), logits(model, ids[1:, 5:])
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64):
            mask = torch.ones(2, TOTAL).to(dtype)
            assert close(logits(model, ids, attention_mask=mask), whole), dtype
            mask[1, :5] = 0
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
            for uses_cache in (False, True):
                with_mask = logits(
                    model, ids, attention_mask=mask, position_ids=positions, use_cache=uses_cache
                )
                assert close(with_mask[0], whole[0]), dtype
                assert close(with_mask[1, 5:], padded[0]), dtype


class TestPositions:
    @pytest.mark.parametrize(
        ("family", "positions"),
        [
            *(pytest.param(family, GAP, id=f"{family}-gap") for family in KINDS),
            pytest.param("llama", STRIDED, id="llama-stride"),
            pytest.param("gemma3_text", GAP + 7, id="gemma3_text-later"),
        ],
    )
    def test_gaps(self, family: str, positions: Tensor) -> None:
        """They were documents without a cache and one text with one, as in transformers; a mask of ones says which."""
        model, ids = hybrid(family, letters="G"), tokens()
        for uses_cache in (False, True):
            with pytest.raises(
                UserError,
                match=r"position_ids go from \d+ to \d+ in row 0.*\ngive an attention_mask",
            ):
                logits(model, ids, position_ids=positions, use_cache=uses_cache)
        given = {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
        whole = logits(model, ids, **given)
        assert close(logits(model, ids, **given, use_cache=True), whole)
        detach(model)
        assert close(whole, logits(model, ids, **given))

    def test_gaps_between_calls(self) -> None:
        """A cache goes on at any later position."""
        model, ids, cache = hybrid(), tokens(), None
        expected = logits(model, ids, position_ids=GAP, attention_mask=torch.ones_like(ids))
        cache = SPKVCache(model)
        logits(model, ids[:, :8], position_ids=GAP[:, :8], past_key_values=cache, use_cache=None)
        found = logits(
            model, ids[:, 8:], position_ids=GAP[:, 8:], past_key_values=cache, use_cache=None
        )
        assert close(found, expected[:, 8:])

    def test_the_first_position(self) -> None:
        model, ids, positions = hybrid(), tokens(), torch.arange(20, 40)[None]
        expected = logits(model, ids)
        assert close(logits(model, ids, position_ids=positions), expected)
        assert close(logits(model, ids, position_ids=positions, use_cache=True), expected)

    @pytest.mark.parametrize("start", [0, 50])
    def test_restarts_beside_a_cache(self, start: int) -> None:
        """Positions that begin late hid that they start again."""
        positions = torch.cat(
            [torch.arange(start, start + 10), torch.arange(start + 3, start + 13)]
        )[None]
        with pytest.raises(
            UserError, match="position_ids start again: a cache holds no packed documents"
        ):
            logits(hybrid(), tokens(), position_ids=positions, use_cache=True)
        with pytest.raises(UserError, match="leave attention_mask out"):
            logits(
                hybrid(), tokens(), position_ids=positions, attention_mask=torch.ones_like(tokens())
            )

    def test_padding_has_any_position(self) -> None:
        model, ids, mask = hybrid(), tokens(), torch.ones(1, TOTAL)
        mask[:, :6] = 0
        positions = torch.cat([torch.full((6,), 1), torch.arange(14)])[None]
        expected = logits(model, ids[:, 6:])
        for uses_cache in (False, True):
            found = logits(
                model, ids, position_ids=positions, attention_mask=mask, use_cache=uses_cache
            )
            assert close(found[:, 6:], expected)


class TestDocuments:
    @pytest.mark.parametrize(
        ("names", "with_ones", "family"),
        pairwise(
            ["position_ids", "cu_seq_lens", "seq_idx", "cu_seq_lens seq_idx", "all"],
            [False, True],
            [kind for kind in KINDS if kind != "qwen3"],
        ),
    )
    def test_each_input_that_tells_documents(
        self, names: str, with_ones: bool, family: str
    ) -> None:
        model, ids = hybrid(family), tokens()
        inputs: dict[str, Any] = {}
        if names in ("position_ids", "all"):
            inputs["position_ids"] = RESTARTING
        if "cu_seq_lens" in names or names == "all":
            inputs |= {
                "cu_seq_lens_q": ENDS.int(),
                "cu_seq_lens_k": ENDS.int(),
                "max_length_q": 9,
                "max_length_k": 9,
            }
        if "seq_idx" in names or names == "all":
            inputs["seq_idx"] = INDEX.int()
        if with_ones:
            inputs["attention_mask"] = torch.ones_like(ids)
        if with_ones and "position_ids" in inputs:
            with pytest.raises(UserError, match="leave attention_mask out"):
                logits(model, ids, **inputs)
            return
        expected = torch.cat([logits(model, part) for part in ids.split(LENGTHS, 1)], 1)
        assert close(logits(model, ids, **inputs), expected)

    @pytest.mark.parametrize("family", ["gpt2", slow("opt"), slow("biogpt")])
    @pytest.mark.parametrize(
        "inputs", [{"seq_idx": INDEX}, {"cu_seq_lens_q": ENDS}, {"position_ids": RESTARTING}]
    )
    def test_positions_that_are_learned(self, family: str, inputs: dict[str, Any]) -> None:
        """Documents told by other inputs than positions had the positions of the row."""
        model, ids = hybrid(family), tokens()
        expected = torch.cat([logits(model, part) for part in ids.split(LENGTHS, 1)], 1)
        assert close(logits(model, ids, **inputs), expected)

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ({"cu_seq_lens_q": ENDS + 1}, "cu_seq_lens_q must ascend from 0 to at most 20 tokens"),
            ({"cu_seq_lens_q": ENDS.flip(0)}, "cu_seq_lens_q must ascend from 0"),
            ({"cu_seq_lens_q": ENDS[None]}, "cu_seq_lens_q must ascend from 0"),
            ({"cu_seq_lens_k": ENDS}, "cu_seq_lens_k is given without cu_seq_lens_q"),
            (
                {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS[[0, -1]]},
                "cu_seq_lens_k differs from cu_seq_lens_q",
            ),
            (
                {"cu_seq_lens_q": ENDS, "position_ids": RESTARTING.flip(0).roll(1)},
                "tell different documents",
            ),
            (
                {"cu_seq_lens_q": ENDS[[0, -1]], "position_ids": RESTARTING},
                "position_ids and cu_seq_lens_q tell diff",
            ),
            (
                {"seq_idx": INDEX // 2, "position_ids": RESTARTING},
                "position_ids and seq_idx tell different documents",
            ),
            (
                {"seq_idx": INDEX // 2, "cu_seq_lens_q": ENDS},
                "cu_seq_lens_q and seq_idx tell different documents",
            ),
            (
                {"seq_idx": INDEX % 2},
                "seq_idx gives tokens apart from each other the same document",
            ),
            ({"seq_idx": INDEX[:, 1:]}, r"seq_idx must be of shape \[1, 20\]"),
            (
                {"seq_idx": INDEX, "attention_mask": torch.arange(TOTAL)[None] > 2},
                "attention_mask has padding, beside",
            ),
            ({"cu_seq_lens_q": ENDS, "use_cache": True}, "a cache holds no packed documents"),
            ({"seq_idx": INDEX, "use_cache": True}, "a cache holds no packed documents"),
        ],
    )
    def test_inputs_that_disagree(self, inputs: dict[str, Any], message: str) -> None:
        """One of two was read, and the other ignored."""
        with pytest.raises(UserError, match=message):
            logits(same_hybrid(), tokens(), **inputs)

    @pytest.mark.parametrize("uses_cache", [False, True])
    def test_one_document_is_nothing(self, uses_cache: bool) -> None:
        model, ids = hybrid(), tokens()
        ends = ENDS[[0, -1]]
        for inputs in (
            {"seq_idx": torch.full_like(ids, 3)},
            {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
        ):
            assert close(logits(model, ids, **inputs, use_cache=uses_cache), logits(model, ids))

    @pytest.mark.parametrize(
        "family",
        [
            pytest.param(family, marks=pytest.mark.slow if family in SLOW else ())
            for family in STATES
        ],
    )
    def test_families_that_pass_states_on(self, family: str) -> None:
        """Their documents saw each other: commands refused them, and calls did not."""
        options = {**FAMILIES, **SLOW}[family]
        # Experts have no products in float64
        model = hybrid(family, dtype=torch.float32, **options)
        ids = tokens()
        for inputs in ({"position_ids": RESTARTING}, {"cu_seq_lens_q": ENDS}, {"seq_idx": INDEX}):
            with pytest.raises(
                UserError, match=f"{type(model).__name__} cannot keep packed documents apart"
            ):
                logits(model, ids, **inputs)
        assert torch.isfinite(logits(model, ids, position_ids=torch.arange(TOTAL)[None])).all()


class TestNothing:
    """Inputs that say nothing pass, whatever other values of them would be refused for."""

    @pytest.mark.parametrize(
        "inputs",
        [
            {"token_type_ids": torch.zeros(1, TOTAL, dtype=torch.long)},
            {"token_type_ids": None, "mm_token_type_ids": None},
            {"output_attentions": False, "output_hidden_states": False},
            {"is_causal": True},
            {"attention_mask": {"full_attention": None}},
            {"some_feature": False, "another": None},
            {"cache_position": torch.arange(TOTAL)},
            {"ignore_index": 0, "labels": torch.zeros(1, TOTAL, dtype=torch.long)},
        ],
        ids=lambda inputs: " ".join(inputs),
    )
    @pytest.mark.parametrize("uses_cache", [False, True])
    def test_inputs_that_say_nothing(self, inputs: dict[str, Any], uses_cache: bool) -> None:
        model, ids = same_hybrid(), tokens()
        assert close(logits(model, ids, **inputs, use_cache=uses_cache), logits(model, ids))

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ({"output_attentions": True}, "output_attentions"),
            ({"is_causal": False}, "is_causal"),
            ({"some_feature": torch.ones(1)}, "some_feature"),
        ],
    )
    def test_inputs_that_say_something(self, inputs: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            logits(same_hybrid(), tokens(), **inputs)

    def test_the_configs_cache(self) -> None:
        """A config that asks for a cache, as before ``apply_layout``, gets one that the model can use."""
        model, ids = hybrid(), tokens()
        expected = logits(model, ids)
        model.config.use_cache = True
        with torch.no_grad():
            output = model(input_ids=ids)
        assert isinstance(output.past_key_values, SPKVCache)
        assert close(output.logits, expected)


class TestGenerate:
    def model(self, family: str = "llama") -> PreTrainedModel:
        model = hybrid(family)
        model.generation_config.eos_token_id = None
        return model

    @pytest.mark.parametrize(
        "family", [slow(kind) if kind in ("qwen3", "youtu") else kind for kind in KINDS]
    )
    def test_chunks_of_a_prompt_with_the_default_cache(self, family: str) -> None:
        """It ended in a ValueError, because the cache was made by the first call."""
        model, ids = self.model(family), tokens(2)
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
        whole = model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY)
        for size in (1, 7, 50):
            found = model.generate(ids, attention_mask=mask, prefill_chunk_size=size, **GREEDY)
            assert torch.equal(found, whole)

    def test_chunks_without_a_cache(self) -> None:
        model = tiny_model()
        attach_gates(model, GateConfig(window=5))
        with pytest.raises(
            UserError, match="prefill_chunk_size needs a cache, which these gates cannot use"
        ):
            model.generate(tokens(), prefill_chunk_size=4, **GREEDY)

    def test_stop_strings(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """The tokenizer was refused as an input of attention."""
        model = tiny_model(vocab_size=300)
        apply_layout(model, Layout(("GL", "LL", "LG", "GG"), 5))
        model.generation_config.eos_token_id = None
        ids = torch.tensor([tiny_tokenizer.encode("the quick brown fox")])
        whole = model.generate(ids, use_cache=False, **GREEDY)[0]
        stop = tiny_tokenizer.decode(whole[ids.shape[1] + 4 :][:1])
        for beams in (1, 3):
            for uses_cache in (True, False):
                options = {
                    **GREEDY,
                    "num_beams": beams,
                    "use_cache": uses_cache,
                    "tokenizer": tiny_tokenizer,
                }
                found = model.generate(ids, stop_strings=[stop], **options)[0]
                if beams == 1:
                    assert torch.equal(found, whole[: len(found)])
                    assert len(found) <= ids.shape[1] + 5

    def test_guidance(self) -> None:
        """It calls the model a second time, with a cache of its own."""
        model, ids = self.model(), tokens()
        found = [
            model.generate(ids, guidance_scale=1.5, use_cache=uses, **GREEDY)
            for uses in (True, False)
        ]
        assert torch.equal(*found)

    @pytest.mark.parametrize("family", ["llama", slow("gemma3_text"), "gpt2"])
    def test_training_mode(self, family: str) -> None:
        """Activation checkpointing dropped the cache below the model, so that tokens saw only themselves."""
        options = {
            "num_key_value_heads": None,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        }
        model = hybrid(family, **options) if family == "gpt2" else hybrid(family)
        model.generation_config.eos_token_id = None
        ids = tokens(2)
        whole = model.generate(ids, use_cache=False, **GREEDY)
        model.train()
        assert torch.equal(model.generate(ids, **GREEDY), whole)
        recompute_activations(model)
        for cache in ({}, {"past_key_values": SPKVCache(model)}):
            with pytest.raises(
                UserError, match=r"drops the cache.*\n?.*call model\.eval\(\) before"
            ):
                model.generate(ids, **GREEDY, **cache)
        assert torch.equal(model.generate(ids, use_cache=False, **GREEDY), whole)
        model.eval()
        assert torch.equal(model.generate(ids, **GREEDY), whole)
