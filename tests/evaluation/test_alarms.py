"""Test that measurements which make no sense are named, and that others are not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import alarms
from spkv_nas.evaluation.alarms import (
    Circumstances,
    alarm,
    changes_alarm,
    check_text,
    control_alarm,
    frequency_nll,
    packing_warning,
)
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference
from spkv_nas.evaluation.separators import SeparatorReport

_KNOWN = SeparatorReport("eos", {"eos": 2.0, "none": 2.1}, 2.0)
_WELL = Circumstances(512, 512, _KNOWN, 0.4, "float32")
_LAYOUTS = {
    "densest": Layout(("GL", "LL"), 8),
    "random-0": Layout(("LG", "LL"), 8),
    "random-1": Layout(("LL", "GL"), 8),
    "wide": Layout(("GG", "GL"), 8),
}


@pytest.fixture(autouse=True)
def brief_checks() -> None:
    """Check on as many tokens as commands do."""


def nll(factor: float) -> DocumentNLL:
    """Return the NLL of twelve documents, ``factor`` times that of full attention but for noise."""
    noise = np.random.default_rng(round(1000 * factor)).normal(1.0, 1e-4, 12)
    return DocumentNLL(factor * noise * np.linspace(200, 400, 12), np.full(12, 100))


class TestTables:
    def test_normal_ones_raise_no_alarm(self) -> None:
        factors = {"densest": 1.01, "random-0": 1.05, "random-1": 1.04, "wide": 1.0}
        assert (
            alarm(_WELL, nll(1.0), {name: nll(value) for name, value in factors.items()}, _LAYOUTS)
            is None
        )

    @pytest.mark.parametrize(
        ("factors", "symptom"),
        [
            (
                (1.03, 0.92, 0.90, 0.95),
                "3 of 4 layouts have a lower NLL than full attention without training",
            ),
            (
                (1.06, 1.02, 1.03, 1.0),
                "densest loses more without training than random layouts of as many heads",
            ),
        ],
    )
    def test_of_the_wrong_text_raise_one(self, factors: tuple[float, ...], symptom: str) -> None:
        """With EOS between its stories, random layouts of stories260k beat full attention by 8 to 13 %."""
        scores = {name: nll(value) for name, value in zip(_LAYOUTS, factors, strict=True)}
        sentence = alarm(_WELL, nll(1.0), scores, _LAYOUTS)
        assert sentence is not None
        assert symptom in sentence
        assert sentence.endswith("No layout is recommended.")

    def test_random_layouts_of_another_number_of_heads_do_not_count(self) -> None:
        scores = {"densest": nll(1.05), "random-0": nll(1.01)}
        layouts = {"densest": _LAYOUTS["densest"], "random-0": _LAYOUTS["wide"]}
        assert alarm(_WELL, nll(1.0), scores, layouts) is None

    @pytest.mark.parametrize(
        ("percent", "error", "raised"),
        [(-1.0, 0.4, True), (-1.0, 0.6, False), (-0.05, 0.01, False)],
    )
    def test_a_gain_must_be_significant_and_matter(
        self, percent: float, error: float, raised: bool
    ) -> None:
        assert (changes_alarm(_WELL, [PairedDifference(percent, error)]) is not None) == raised

    @pytest.mark.parametrize(("factor", "raised"), [(0.9, True), (0.99, False), (1.1, False)])
    def test_a_control_that_gains_much_raises_one(self, factor: float, raised: bool) -> None:
        sentence = control_alarm(_WELL, nll(factor), nll(1.0))
        assert (sentence is not None) == raised
        assert not raised or "improved full attention (the control) by 10" in str(sentence)


@pytest.mark.parametrize(
    ("owners", "warned"), [([0, 0, 0, 0], False), ([0, 1, 1, 1], True), ([0, 0, 0, 1], False)]
)
def test_packing_is_warned_of_where_documents_share_blocks(owners: list[int], warned: bool) -> None:
    """It costs nothing where documents fill blocks of their own."""
    document = np.array([owners] * 5, dtype=np.int32)
    blocks = TokenBlocks(np.zeros_like(document), document, ())
    warning = packing_warning(replace(_KNOWN, alone=1.96), blocks)  # 2 % less than packed
    assert (warning is not None) == warned


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"block_size": 1024}, "the model's context is 512 tokens: use --context 512"),
        ({"share": 0.9}, "the text or the tokenizer is not what the model was trained with"),
        (
            {"separator": SeparatorReport("bos")},
            "documents are separated by 'bos', which was not measured",
        ),
        (
            {"separator": replace(_KNOWN, alone=1.9)},
            "packing documents into blocks costs the model 5.3 % of NLL",
        ),
        ({"dtype": "float16"}, "the model computes in float16"),
        ({}, "the text is unlike what the model was trained on"),
    ],
)
def test_the_likely_cause_is_named(changed: dict[str, object], cause: str) -> None:
    sentence = changes_alarm(replace(_WELL, **changed), [PairedDifference(-5.0, 1.0)])  # type: ignore[arg-type]
    assert sentence is not None
    assert cause in sentence


def test_frequencies_predict_independent_tokens_as_well_as_their_entropy() -> None:
    probability = np.array([0.5, 0.25, 0.125, 0.125])
    tokens = np.random.default_rng(0).choice(4, size=(64, 512), p=probability).astype(np.int32)
    blocks = TokenBlocks(tokens, np.zeros_like(tokens), ())
    assert frequency_nll(blocks, 4) == pytest.approx(
        -(probability * np.log(probability)).sum(), rel=1e-2
    )


def _shuffled(text: str) -> str:
    words = text.split(" ")
    random.Random(0).shuffle(words)
    return " ".join(words)


def _checked(model: PreTrainedModel, tokenizer: Any, texts: Iterable[str], size: int) -> str | None:
    """Return the alarm about texts in blocks of ``size`` tokens."""
    _, sentence = check_text(
        model, spkv_nas.build_blocks(texts, tokenizer, size, separator="eos"), 32, _KNOWN
    )
    return sentence


def test_a_text_that_a_model_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks tell shuffled words from code: they have more than twice the share of the NLL of frequencies."""
    monkeypatch.setattr(alarms, "_SAMPLE", 1024)
    model, tokenizer = spkv_nas.load("embedded:dense")
    texts = [file.read_text() for file in sorted(Path(json.__file__).parent.glob("*.py"))]
    assert _checked(model, tokenizer, texts, 512) is None
    assert "of what token frequencies alone give" in str(
        _checked(model, tokenizer, map(_shuffled, texts), 512)
    )


@pytest.mark.filterwarnings("ignore:sequences of 64 tokens are longer")
def test_blocks_of_twice_the_context(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny_model(vocab_size=len(tiny_tokenizer), max_position_embeddings=32)
    sentence = _checked(model, tiny_tokenizer, ["the quick brown fox " * 100] * 4, 64)
    assert "blocks of 64 tokens are longer than the model's context" in str(sentence)
