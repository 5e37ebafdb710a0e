"""Test attention mass and retrieval scores against a direct computation from full attention matrices."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import gated, tiny_model
from model.test_cache_families import FAMILIES, SLOW
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.contrib.signals.measure.attention_mass import attention_mass
from spkv_nas.contrib.signals.measure.retrieval import needles, retrieval
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.tokenizer import PLAIN, Boundaries
from spkv_nas.model.attention import layer_states
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing import heads

WINDOW, LENGTH, BOS = 6, 40, 1


@pytest.fixture
def blocks() -> TokenBlocks:
    """Token blocks: 6 of 40 tokens; 10 documents of 24 tokens in two domains, so that documents cross blocks."""
    tokens = np.random.default_rng(0).integers(3, 290, size=(6, LENGTH)).astype(np.int32)
    owner = np.repeat(np.arange(10, dtype=np.int32), 24).reshape(6, LENGTH)
    return TokenBlocks(
        tokens, owner, tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(10))
    )


def attentions(family: str, tokens: np.ndarray, **options: Any) -> np.ndarray:
    """Return attention float64 [L, N, Hq, T, T] of the dense model, by transformers' eager implementation."""
    model = tiny_model(family, vocab_size=300, **options).double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(tokens.astype(np.int64)), output_attentions=True)
    return torch.stack(out.attentions).numpy()


def copying(family: str, blocks: TokenBlocks, **options: Any) -> np.ndarray:
    """Return the attention [N, 7, L, Hq] on the tokens to copy of needles of 8 tokens."""
    tokens, depth = texts_with_needles(blocks, WINDOW, 8, 3)
    weights, queries = attentions(family, tokens, **options), np.arange(LENGTH - 8, LENGTH - 1)
    return np.stack(
        [weights[:, i, :, queries, at + 1 + np.arange(7)] for i, at in enumerate(depth)]
    )


@pytest.mark.filterwarnings("ignore:the model predicts:UserWarning")
@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
def test_queries_that_read_the_keys_of_another_layer(family: str, blocks: TokenBlocks) -> None:
    """They count for the heads whose keys they read: layer 5 reads those of layer 3, and layer 4 those of layer 2."""
    options = {**FAMILIES, **SLOW}[family] | {"vocab_size_per_layer_input": 300}
    model = tiny_model(family, vocab_size=300, **options)
    mass = (
        attentions(family, blocks.tokens, **options) * np.tril(np.ones((LENGTH, LENGTH)), -WINDOW)
    ).sum(-1)
    mass = mass[..., WINDOW:].reshape(6, 6, 2, 2, -1).mean((1, 3, 4))  # [L, Hkv]
    expected = [np.zeros(2), mass[1], np.zeros(2), (mass[3] + mass[5]) / 2]
    assert attention_mass(model, blocks, WINDOW).density == pytest.approx(
        np.stack(expected), abs=1e-6
    )
    # Retrieval: the best query head that reads a KV head
    score = copying(family, blocks, **options).mean((0, 1)).reshape(6, 2, 2).max(-1)
    expected = [np.zeros(2), score[1], np.zeros(2), np.maximum(score[3], score[5])]
    density = retrieval(model, blocks, WINDOW, needle_length=8, seed=3).density
    assert density == pytest.approx(np.stack(expected), abs=1e-6)
    assert (score[5] > score[3]).any()


class TestAttentionMass:
    @pytest.mark.parametrize("family", ["llama", "gemma3_text", "granite"])
    @pytest.mark.parametrize("sinks", [0, 2])
    def test_attention_mass_is_outside_the_window(
        self, family: str, sinks: int, blocks: TokenBlocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Queries are chunked; a Gemma's local layers, of 4 keys, stay local whatever the window, and score 0."""
        window = 3 if family == "gemma3_text" else WINDOW
        monkeypatch.setattr(heads, "_CHUNK_BYTES", 1)
        monkeypatch.setattr(heads, "_CHUNK_ROWS", 7)
        model = tiny_model(family, vocab_size=300).double()
        table = attention_mass(model, blocks, window, sinks=sinks, batch_size=4)
        far = np.tril(np.ones((LENGTH, LENGTH)), -window)
        far[:, :sinks] = 0
        # [L, N, Hkv, T]
        mass = (attentions(family, blocks.tokens) * far).sum(-1).reshape(4, 6, 2, 2, LENGTH).mean(3)
        assert 0.1 < mass[0].mean() < mass[1].mean() * 1.1 < 0.99
        if family == "gemma3_text":
            mass[::2] = 0
        chosen = np.broadcast_to(np.arange(LENGTH) >= window, (6, LENGTH))
        for domain, parity in (("a", 0), ("b", 1)):
            mine = chosen & (blocks.document % 2 == parity)
            values = mass.transpose(0, 2, 1, 3)[:, :, mine]
            # The softmax of transformers is in float32
            assert table.domain_density(domain) == pytest.approx(values.mean(-1), abs=1e-7)
            by_document = [values[..., blocks.document[mine] == i] for i in range(parity, 10, 2)]
            residual = [part.sum(-1) - values.mean(-1) * part.shape[-1] for part in by_document]
            left = [1 - part.shape[-1] / mine.sum() for part in by_document]
            jackknife = [one / share for one, share in zip(residual, left, strict=True)]
            error = np.sqrt(np.square(jackknife).sum(0) * 4 / 5) / mine.sum()
            rows = table.rows[table.rows["domain"] == domain]
            assert rows["standard_error"].to_numpy() == pytest.approx(error.ravel(), abs=1e-7)
            assert set(rows["num_tokens"]) == {mine.sum()}
        assert (table.signal, table.window, table.tau) == ("attention-mass", window, 0.5)

    def test_gates_and_windows_do_not_count(self, blocks: TokenBlocks) -> None:
        """The model's original attention is measured; gates and layout are restored afterwards."""
        expected = attention_mass(tiny_model(vocab_size=300), blocks, WINDOW).density
        hybrid = tiny_model(vocab_size=300)
        apply_layout(hybrid, Layout(("LL",) * 4, window=3))
        for model in (gated(), hybrid):
            before = copy.deepcopy([(s.settings, s.windows) for s in layer_states(model)])
            assert attention_mass(model, blocks, WINDOW).density == pytest.approx(
                expected, abs=1e-6
            )
            states = layer_states(model)
            assert [(s.settings, s.windows) for s in states] == before
            assert all(s.observer is None for s in states)


def texts_with_needles(
    blocks: TokenBlocks, window: int, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids int64 [N, T] and the needles' positions [N]."""
    return needles(blocks, window, length, seed).rows(0, blocks.num_blocks)


def induction_model(blocks: TokenBlocks) -> PreTrainedModel:
    """Make a model whose query head 3 of layer 3 (KV head 1) is an induction head, by orthogonal codes.

    The layer has no position embedding (SmolLM3), so that query and key are what the hooks say.
    """
    model = tiny_model("smollm3", vocab_size=300, hidden_size=256)
    codes = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).sign()
    tokens: list[Tensor] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _m, args: tokens.append(args[0]))
    layer = model.model.layers[3].self_attn

    def query(_m: Any, _a: Any, out: Tensor) -> Tensor:
        return torch.cat((out[..., :192], 5.0 * codes[tokens[-1]]), -1)

    def key(_m: Any, _a: Any, out: Tensor) -> Tensor:
        return torch.cat((out[..., :64], codes[tokens[-1].roll(1, 1)]), -1)

    layer.q_proj.register_forward_hook(query)
    layer.k_proj.register_forward_hook(key)
    return model


@pytest.mark.filterwarnings("ignore:the model predicts:UserWarning")
class TestRetrieval:
    def test_needles_are_repeated_outside_the_window(self, blocks: TokenBlocks) -> None:
        for length, seed in itertools.product((2, 8, 14), (0, 1)):
            tokens, depth = texts_with_needles(blocks, 12, length, seed)
            assert tokens.shape == blocks.tokens.shape
            for row, text, at in zip(tokens, blocks.tokens, depth, strict=True):
                assert np.array_equal(row[at : at + length], row[-length:])
                # From a token of the repetition back to the one it copies
                assert LENGTH - length - at - 1 >= 12
                assert np.array_equal(
                    np.delete(row, slice(at, at + length))[:-length], text[: LENGTH - 2 * length]
                )
                assert len(set(row[-length:])) == length
        assert not np.array_equal(
            texts_with_needles(blocks, 12, 8, 0)[0], texts_with_needles(blocks, 12, 8, 1)[0]
        )
        assert needles(blocks, 25, 14, 0).depth.tolist() == [0] * 6  # there is one place left
        with pytest.raises(UserError, match="cannot hold a needle of 14 tokens"):
            needles(blocks, 26, 14, 0)

    def test_needles_leave_the_first_tokens(self, blocks: TokenBlocks) -> None:
        tokens = blocks.tokens.copy()
        tokens[:, 0] = BOS
        blocks = replace(blocks, tokens=tokens, boundaries=Boundaries((BOS,)))
        for sinks, first in ((0, 1), (4, 4)):
            tokens, depth = needles(blocks, WINDOW, 4, 0, sinks).rows(0, blocks.num_blocks)
            assert depth.min() >= first
            assert (tokens[:, 0] == BOS).all()
            assert not (tokens[:, 1:] == BOS).any()
        assert len(needles(replace(blocks, boundaries=PLAIN), WINDOW, 4, 0).depth) == 6

    @pytest.mark.parametrize("family", ["llama", "granite"])
    def test_is_the_attention_on_the_token_to_copy(self, family: str, blocks: TokenBlocks) -> None:
        table = retrieval(
            tiny_model(family, vocab_size=300),
            blocks,
            WINDOW,
            needle_length=8,
            batch_size=4,
            seed=3,
        )
        scores, owner = copying(family, blocks), blocks.document[:, LENGTH - 8 : LENGTH - 1]
        expected = scores.mean((0, 1)).reshape(4, 2, 2)
        assert table.density == pytest.approx(expected.max(-1), abs=1e-6)
        best = expected.argmax(-1)
        of_b = scores[owner % 2 == 1].mean(0).reshape(4, 2, 2)
        of_best = np.take_along_axis(of_b, best[..., None], 2)[..., 0]
        assert table.domain_density("b") == pytest.approx(of_best, abs=1e-6)

    def test_a_hand_built_induction_head_scores_high(self, blocks: TokenBlocks) -> None:
        table = retrieval(induction_model(blocks), blocks, WINDOW, needle_length=8)
        assert table.density[3, 1] > 0.7
        assert np.delete(table.density.ravel(), 7).max() < 0.3

    def test_a_model_that_does_not_copy_is_called_out(self, blocks: TokenBlocks) -> None:
        with pytest.warns(UserWarning, match=r"predicts only \d\.\d% of the needle tokens"):
            retrieval(tiny_model(vocab_size=300), blocks, WINDOW, needle_length=8)

    @pytest.mark.filterwarnings("error:the model predicts:UserWarning")
    def test_retrieval_score_measures_copying(self, blocks: TokenBlocks) -> None:
        """The head gets the first four of a needle's seven answers."""
        model = tiny_model(vocab_size=300)
        answers = torch.nn.functional.one_hot(
            torch.from_numpy(texts_with_needles(blocks, WINDOW, 8, 0)[0])[:, -7:], 300
        ).float()
        answers[:, 4:] = answers[:, 4:].roll(1, -1)
        model.lm_head.register_forward_hook(lambda *_: answers)
        assert retrieval(model, blocks, WINDOW, needle_length=8).record.entries()[
            "copy_accuracy"
        ] == round(4 / 7, 4)
