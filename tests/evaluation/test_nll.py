"""Test that a non-finite result is an error, never a gap in a table or a density of 0."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gated, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import (
    PositionSums,
    document_nll,
    evaluate,
    own_positions,
    position_edges,
    tau_sweep,
)
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.gates import predictors
from spkv_nas.model.generation import generate
from spkv_nas.probing.density import probe
from spkv_nas.probing.measure import measure_signal


def spoil(model: PreTrainedModel, value: float = math.nan) -> PreTrainedModel:
    """Set one weight of the model's last norm to a non-finite number."""
    model.model.norm.weight.data[3] = value
    return model


def spoil_gates(model: PreTrainedModel) -> PreTrainedModel:
    """Make one predictor return NaN for its second head."""
    list(predictors(model).values())[2].down.bias.data[1] = math.nan
    return model


class TestNLL:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_of_all_documents(self, value: float, blocks: TokenBlocks) -> None:
        with pytest.raises(
            UserError, match=r"the NLL of 12 of 12 documents is not a finite number\nthe model's"
        ):
            document_nll(spoil(tiny_model(), value), blocks)

    def test_one_document_with_nan(self, blocks: TokenBlocks) -> None:
        """The token with a NaN embedding occurs in one document."""
        model = tiny_model(vocab_size=300)
        blocks.tokens[0, 5] = 299
        model.model.embed_tokens.weight.data[299] = math.nan
        # And the next, in the same block
        with pytest.raises(UserError, match="the NLL of 2 of 12 documents"):
            document_nll(model, blocks)

    def test_of_layouts(self, blocks: TokenBlocks, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="not a finite number"):
            zero_shot(spoil(tiny_model()), [Layout(("GL",) * 4, 8)], blocks, cache=tmp_path)
        assert not list(tmp_path.iterdir())

    def test_of_thresholds(self, blocks: TokenBlocks) -> None:
        with pytest.raises(UserError, match="not a finite number"):
            tau_sweep(spoil(gated()), blocks, [0.5])

    @pytest.mark.parametrize(
        ("total", "num_tokens"),
        [([math.nan], [1]), ([1.0], [-1]), ([1.0, 2.0], [1]), ([[1.0]], [[1]]), (["x"], [1])],
    )
    def test_in_a_file(self, total: Any, num_tokens: Any, tmp_path: Path) -> None:
        np.savez(tmp_path / "nll.npz", total=np.array(total), num_tokens=np.array(num_tokens))
        with pytest.raises(UserError, match=r"nll\.npz is damaged: .*\nremove its folder"):
            DocumentNLL.read(tmp_path / "nll.npz")


class TestDensity:
    message = r"the utility is not a number for 1 of 8 KV heads, the first in layer 2, head 1\nthe model's weights"

    def test_probe_of_nan_gates(self, blocks: TokenBlocks) -> None:
        """NaN gates are an error, not a density of 0."""
        with pytest.raises(UserError, match=self.message):
            probe(spoil_gates(gated()), blocks)

    def test_of_an_evaluation(self, blocks: TokenBlocks) -> None:
        with pytest.raises(UserError, match=self.message):
            evaluate(spoil_gates(gated()), blocks)


@pytest.mark.filterwarnings("ignore:the model predicts")  # that it hardly copies
@pytest.mark.parametrize("signal", ["attention-mass", "retrieval", "duo", "head-gates"])
def test_signals(signal: str, blocks: TokenBlocks) -> None:
    model = tiny_model(vocab_size=300)
    model.model.layers[1].self_attn.q_proj.weight.data[3] = math.nan
    learns = {"duo": "duo: the distillation loss", "head-gates": "head gates: the loss"}
    message = (
        f"{learns[signal]} is nan at step 1"
        if signal in learns
        else f"the score '{signal}' is not a number"
    )
    options: dict[str, Any] = {"window": 4, "steps": 2 if signal in learns else None}
    with pytest.raises(UserError, match=message):
        measure_signal(signal, model, blocks, sinks=0, **options)
    # When its sinks are measured
    with pytest.raises(UserError, match="the model's attention is not finite"):
        measure_signal(signal, model, blocks, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error_in_generation(
    temperature: float, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Sampling and greedy decoding both report NaN logits."""
    for model in (tiny_model(vocab_size=300), gated()):
        generate(model, tiny_tokenizer, "the fox", max_new_tokens=3, temperature=temperature)
        with pytest.raises(UserError, match="the model's logits are not finite"):
            generate(
                spoil(model), tiny_tokenizer, "the fox", max_new_tokens=3, temperature=temperature
            )


def test_a_prompt_with_tokens_of_another_model(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="the tokenizer has a token"):
        generate(tiny_model(vocab_size=20), tiny_tokenizer, "the fox")


def test_a_prompt_and_an_answer_longer_than_the_table_of_positions(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The last new token is not read."""
    model = tiny_model("gpt2", vocab_size=300, max_position_embeddings=32)
    model.generation_config.eos_token_id = 299
    most = 33 - len(tiny_tokenizer("the fox")["input_ids"])
    assert generate(model, tiny_tokenizer, "the fox", max_new_tokens=most).num_new_tokens <= most
    with pytest.raises(
        UserError, match="sequences of 33 tokens are longer than the model's table of 32 positions"
    ):
        generate(model, tiny_tokenizer, "the fox", max_new_tokens=most + 1)


def test_positions_count_tokens_of_the_same_document_in_the_block() -> None:
    document = np.array([[3, 3, 3, 5, 5, 3], [7, 7, 7, 7, 7, 7]])
    assert own_positions(document).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert position_edges(16) == [0, 16]
    assert position_edges(100) == [0, 16, 32, 64, 100]


def test_sums_by_position_are_those_by_document(blocks: TokenBlocks) -> None:
    """They are other groups of the same losses, from the same pass."""
    positions = PositionSums(blocks)
    by_document = document_nll(tiny_model(), blocks, positions=positions)
    sums = positions.result()
    assert sums[:, 0].sum() == pytest.approx(by_document.total.sum())
    assert sums[:, 1].sum() == by_document.num_tokens.sum()
