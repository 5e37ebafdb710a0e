"""Test that the separator between documents is the one that a model was trained with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_model
from numpy.random import Generator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import spkv_nas
from spkv_nas.base.errors import UserError
from spkv_nas.data.tokenizer import Boundaries, boundaries, default_separator, train_bpe
from spkv_nas.evaluation.alarms import about_packing
from spkv_nas.evaluation.separators import (
    MAX_PACKING_COST,
    SeparatorReport,
    _best,
    shared_separator,
)

_WORDS = ["alpha", "beta", "gamma", "delta", "kappa", "omega", "sigma", "theta"]
_LENGTH, _STEPS = 64, 150


@pytest.fixture(autouse=True)
def brief_checks() -> None:
    """Check on as many tokens as commands do."""


def documents(number: int, rng: Generator) -> Iterator[str]:
    """Yield documents that repeat three words, which only their own beginning tells."""
    for _ in range(number):
        yield " ".join(np.resize(rng.choice(_WORDS, size=3, replace=False), rng.integers(9, 18)))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer with EOS that puts BOS before a text."""
    return train_bpe(documents(100, np.random.default_rng(0)), 300, bos=True)


def row(
    tokenizer: PreTrainedTokenizerBase, limits: Boundaries, is_alone: bool, rng: Generator
) -> list[int]:
    """Return a training sequence: a document alone, or several with separators."""
    tokens = [*limits.opening]
    while len(tokens) < _LENGTH:
        (text,) = documents(1, rng)
        tokens += [*tokenizer(text, add_special_tokens=False)["input_ids"], *limits.separator]
        if is_alone:
            return tokens + [0] * (_LENGTH - len(tokens))
    return tokens[:_LENGTH]


def trained(
    tokenizer: PreTrainedTokenizerBase, separator: str, *, is_alone: bool = False
) -> PreTrainedModel:
    """Train a tiny model on documents with a separator, packed or each alone."""
    limits = boundaries(tokenizer, separator, separator in ("bos", "eos+bos"), _LENGTH)
    rng = np.random.default_rng(1)
    model = tiny_model(vocab_size=300, num_hidden_layers=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(_STEPS):
        batch = torch.tensor([row(tokenizer, limits, is_alone, rng) for _ in range(8)])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.slow
class TestTrainedModels:
    @pytest.mark.parametrize("separator", ["bos", "eos", "eos+bos"])
    def test_the_separator_of_training_is_best(
        self, tokenizer: PreTrainedTokenizerBase, separator: str
    ) -> None:
        """stories260k, trained with BOS between stories, lost 23 % of NLL to an EOS that it had never seen."""
        texts = list(documents(200, np.random.default_rng(7)))
        report = spkv_nas.measure_separator(
            trained(tokenizer, separator), tokenizer, texts, _LENGTH
        )
        assert report.best == separator
        others = [value for name, value in report.nll.items() if separator not in name]
        assert min(others) > 1.03 * report.nll[separator]

    def test_a_model_without_separators_has_none_that_is_better(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        texts = list(documents(200, np.random.default_rng(7)))
        report = spkv_nas.measure_separator(trained(tokenizer, "none"), tokenizer, texts, _LENGTH)
        assert report.nll[report.best] == pytest.approx(report.nll["none"], rel=2e-3)

    def test_packing_costs_a_model_of_documents_alone(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Such a model never saw a token of another document."""
        texts = list(documents(200, np.random.default_rng(7)))
        report = spkv_nas.measure_separator(
            trained(tokenizer, "eos+bos", is_alone=True), tokenizer, texts, _LENGTH
        )
        assert report.packing_cost > MAX_PACKING_COST
        assert f"costs the model {report.packing_cost:.1f} % of NLL" in about_packing(report)


class TestChoice:
    @pytest.mark.parametrize(
        ("others", "best"), [([1.0, 1.1, 0.9], "eos"), ([1.0, 1.01, 1.02], "bos")]
    )
    def test_the_convention_stays_unless_it_is_clearly_worse(
        self, others: list[float], best: str
    ) -> None:
        convention = np.array([1.2, 1.3, 1.1]) if best == "eos" else np.array([1.01, 1.0, 1.02])
        assert _best({"eos": np.array(others), "bos": convention}, "bos") == best

    def test_the_convention_is_what_begins_a_text(self, tokenizer: PreTrainedTokenizerBase) -> None:
        assert default_separator(tokenizer) == "bos"
        assert default_separator(tokenizer, bos=False) == "eos"

    def test_is_measured_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """All commands on a model in a workspace share what the first one measured."""
        calls: list[int] = []

        def measure() -> SeparatorReport:
            calls.append(1)
            return SeparatorReport("bos", {"bos": 1.0, "eos": 1.5}, 0.99)

        find = partial(shared_separator, tmp_path / "separators.json", measure=measure)
        with caplog.at_level(logging.INFO, "spkv_nas"):
            first, again, other = (find(checkpoint=name) for name in ("a", "a", "b"))
        assert first == again == other
        assert len(calls) == 2
        # The choice takes seconds, so it is announced as it begins
        announced = [line for line in caplog.messages if line.startswith("choosing")]
        assert announced == 2 * ["choosing what separates documents"]

    def test_without_text_there_is_an_error(self, tokenizer: PreTrainedTokenizerBase) -> None:
        with pytest.raises(UserError, match="no document has two tokens: the text is empty"):
            spkv_nas.measure_separator(tiny_model(vocab_size=300), tokenizer, [])


class TestBoundaries:
    @pytest.mark.parametrize(
        ("separator", "names"),
        [("none", ""), ("eos", "eos"), ("bos", "bos"), ("eos+bos", "eos bos"), ("Ġ", "Ġ")],
    )
    def test_are_tokens_after_a_document(
        self, tokenizer: PreTrainedTokenizerBase, separator: str, names: str
    ) -> None:
        tokens = {
            "eos": tokenizer.eos_token_id,
            "bos": tokenizer.bos_token_id,
            "Ġ": tokenizer.get_vocab()["Ġ"],
        }
        assert boundaries(tokenizer, separator, "auto", 8).separator == tuple(
            tokens[name] for name in names.split()
        )

    @pytest.mark.parametrize(
        ("separator", "named"), [("bos", "no BOS token"), ("nothing", "no 'nothing' token")]
    )
    def test_of_a_token_that_is_missing_are_refused(self, separator: str, named: str) -> None:
        plain = train_bpe(["a text"], 260)
        with pytest.raises(UserError, match=named):
            boundaries(plain, separator, "auto", 8)

    def test_do_not_begin_a_block_twice(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """A document that fills its block leaves its separator, which would follow the BOS of the next block."""
        blocks = spkv_nas.build_blocks(
            [f"{i}" + "beta" * 7 * (1 + i % 5) for i in range(100)], tokenizer, 8, separator="bos"
        )
        assert blocks.num_blocks > 50
        assert (blocks.tokens[:, 0] == tokenizer.bos_token_id).all()
        assert (blocks.tokens[:, 1] != tokenizer.bos_token_id).all()
