"""Test the criteria of ``verdict`` besides the NLL, each as the command runs it: its answers, and that it resumes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_model
from marks import slow_after
from paths import ROOT
from transformers import PreTrainedTokenizerBase
from verdict_cases import check_resumes, decisive_model, run, write_folder

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import registry
from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.agreement.stage import Agreement, compare
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.tokenizer import SeparateDocuments
from spkv_nas.evaluation.continuations import write_continuations
from spkv_nas.evaluation.displacement import compared_documents
from spkv_nas.evaluation.verdict.criteria import (
    CRITERIA,
    ContinuationRounds,
    DisplacementRounds,
    RecallRounds,
    criteria_help,
    one_per_document,
    options_help,
)
from spkv_nas.evaluation.verdict.criterion import Setting
from spkv_nas.model import loss
from spkv_nas.model.windows import layout_applied
from spkv_nas.report.verdict_cards import card_title


@pytest.fixture
def folder(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Write models, a text and layouts; make their folder the current one."""
    monkeypatch.chdir(tmp_path)
    write_folder(tiny_tokenizer)
    return tmp_path


class TestContinuations:
    @pytest.mark.parametrize("criterion", ["agreement", "acceptance"])
    def test_full_attention_passes_and_local_layers_fail(
        self, folder: Path, criterion: str
    ) -> None:
        result = run("full.yaml", "three-to-one.yaml", margin=f"{criterion}=12")
        assert result.answers == {"full": "passes", "three-to-one": "fails"}
        full, local = result.rows.to_dict("records")
        assert (full["criterion"], full["unit"], full["loss"]) == (
            criterion,
            "points",
            pytest.approx(0.0, abs=1e-3),
        )
        assert full["low"] == pytest.approx(0.0, abs=1e-3)
        assert local["num_samples"] <= 32
        assert local["low"] > 12.0

    @pytest.mark.parametrize("criterion", slow_after(1, ["agreement", "acceptance"]))
    def test_an_interrupted_verdict_gives_the_same_bytes(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, criterion: str
    ) -> None:
        check_resumes(
            ContinuationRounds,
            monkeypatch,
            "three-to-one.yaml",
            margin=f"{criterion}=90",
            max_tokens=1024,
        )

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_scores_are_those_of_the_comparison(
        self, tiny_tokenizer: PreTrainedTokenizerBase, blocks: TokenBlocks, temperature: float
    ) -> None:
        """In rounds, with a layout on the dense model itself, as ``compare`` measures it with two models."""
        layout = Layout(("GG", "GG", "GL", "GG"), window=8)
        many = replace(
            blocks, tokens=np.tile(blocks.tokens, (3, 1)), document=np.tile(blocks.document, (3, 1))
        )
        model, reader = decisive_model(), decisive_model()
        texts = write_continuations(
            reader, tiny_tokenizer, many, 12, temperature=temperature, seed=5
        )
        with layout_applied(model, layout):
            result = Agreement.of(
                compare(model, reader, many, texts, 12, temperature=temperature), temperature
            )
        rounds = ContinuationRounds(tiny_tokenizer, many, 12, temperature, 5, "text")
        assert (rounds.num_samples, rounds.num_rounds) == (27, 2)
        measured, dense = [], []
        for index in range(2):
            prepared = rounds.prepare(index, model)
            dense.append(rounds.measure(index, model, prepared))
            with layout_applied(model, layout):
                measured.append(rounds.measure(index, model, prepared))
        assert (rounds.scores(dense) == 1.0).all()
        assert rounds.scores(measured) == pytest.approx(np.nanmean(result.kept, 1), abs=1e-5)
        assert 0.1 < rounds.scores(measured).mean() < 0.95

    def test_each_document_is_continued_once(self, blocks: TokenBlocks) -> None:
        chosen = one_per_document(blocks, 12)
        last = chosen.document[:, 32 - 12 - 1].tolist()
        assert len(set(last)) == len(last)
        assert set(last) == set(blocks.document[:, 32 - 12 - 1].tolist())

    def test_a_continuation_as_long_as_a_block(self, folder: Path) -> None:
        with pytest.raises(UserError, match="leaves no prompt in a block of 32 tokens"):
            run("full.yaml", margin="agreement=2:new-tokens=32")


class TestDisplacement:
    @pytest.mark.parametrize(("criterion", "margin"), [("kld", 0.5), ("same-top", 25.0)])
    def test_full_attention_passes_and_local_layers_fail(
        self, folder: Path, criterion: str, margin: float
    ) -> None:
        result = run("full.yaml", "three-to-one.yaml", margin=f"{criterion}={margin}")
        assert result.answers == {"full": "passes", "three-to-one": "fails"}
        full, local = result.rows.to_dict("records")
        assert full["loss"] == pytest.approx(0.0, abs=1e-4)
        assert local["low"] > margin
        assert local["kl_mean"] > 0.0
        assert result.displacement["three-to-one"].kl_mean == local["kl_mean"]

    def test_criteria_share_their_passes(self, folder: Path) -> None:
        """With the NLL, they measure nothing more; every document counts as much."""
        both = run("three-to-one.yaml", margin="nll=90%,kld=90,same-top=99", max_tokens=4096)
        again = run("three-to-one.yaml", margin="kld=90,same-top=99", max_tokens=4096)
        stores = [each.compared.trial.store for each in (both, again)]
        assert stores[0].num_measured <= 2 * both.compared.trial.samples["nll"].num_rounds
        assert stores[1].num_measured == 0
        assert list(both.rows["criterion"]) == ["nll", "kld", "same-top"]
        divergence = both.rows.iloc[1]
        assert divergence["num_clipped"] == 0
        assert math.isnan(float(again.rows["kl_mean"][1]))
        # Documents of about equal length, so both means are near each other
        assert divergence["loss"] == pytest.approx(
            both.displacement["three-to-one"].kl_mean, rel=0.1
        )

    def test_an_interrupted_verdict_gives_the_same_bytes(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check_resumes(
            DisplacementRounds, monkeypatch, "three-to-one.yaml", margin="kld=90", max_tokens=1024
        )

    def test_scores_are_means_of_documents(self, blocks: TokenBlocks) -> None:
        """Over rounds of one block, a document is complete with its last compared token."""
        rounds = DisplacementRounds(Setting(decisive_model(), None, blocks), 0)
        rounds.size = 1
        document = compared_documents(blocks)
        random = np.random.default_rng(0)
        values = random.random((3, *document.shape))
        parts = [values[:, [index]] for index in range(len(blocks))]
        expected = [
            values[0][document == each].mean() for each in np.unique(document[document >= 0])
        ]
        scores = rounds.scores(parts)
        assert sorted(scores) == pytest.approx(sorted(expected))
        for number in range(1, len(parts)):
            first = rounds.scores(parts[:number])
            assert len(first) == rounds.num_complete(number)
            assert first == pytest.approx(scores[: len(first)])

    def test_logits_that_depend_on_more(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = loss.logits_of
        monkeypatch.setattr(loss, "logits_of", lambda *arguments: 2.0 * original(*arguments))
        with pytest.raises(UserError, match="kld and same-top cannot be measured: the logits"):
            run("full.yaml", margin="kld=0.1")


class TestRecall:
    def test_scores_are_the_tokens_predicted_where_a_passage_occurs_again(
        self, blocks: TokenBlocks
    ) -> None:
        """By a model that predicts each token's successor, whose passages hold some."""
        model = tiny_model(vocab_size=300)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weights.zero_()
            model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
        tokens = blocks.tokens.copy()
        tokens[0, 4:12], tokens[1, 4:12] = [7, 8, 9, 10, 11, 12, 50, 51], [7, 8, 9, 3, 4, 9, 1, 2]
        rounds = RecallRounds(replace(blocks, tokens=tokens), 4, 8, "text")
        assert rounds.measure(0, model, {})[:2].tolist() == [0.75, 0.5]

    def test_a_passage_is_as_far_from_its_repetition_as_wanted(self, folder: Path) -> None:
        result = run("full.yaml", margin="recall=50:distance=20")
        assert result.rows["loss"].item() == 0.0
        assert result.rows["num_samples"].item() > 1
        with pytest.raises(
            UserError, match="passages of 8 tokens cannot be 25 apart: blocks of 32 have up to 32"
        ):
            run("full.yaml", margin="recall=50:distance=25")

    def test_documents_are_shorter_than_blocks(self, blocks: TokenBlocks) -> None:
        """Most blocks end with 20 tokens of a document, the others with 16."""
        document = np.repeat(np.arange(2 * len(blocks)), 16).reshape(-1, 32).astype(np.int32)
        document[::2] = np.where(np.arange(32) < 12, 0, document[::2, -1:])
        rounds = CRITERIA["recall"].prepare(
            Setting(decisive_model(), None, replace(blocks, document=document))
        )
        assert isinstance(rounds, RecallRounds)
        assert rounds.identity.endswith(" 12 8"), (
            "a distance of 12: the median of 20 tokens, less a passage"
        )
        assert rounds.num_samples == -(-len(blocks) // 2)


class TestOwnCriterion:
    """A package outside adds a criterion with an option in one file, that of docs/tutorials/extend-strategies.md."""

    @pytest.fixture(autouse=True)
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        page = (ROOT / "docs" / "tutorials" / "extend-strategies.md").read_text()
        (block,) = re.findall(r"```python\n(\"\"\"Define a criterion.*?)```", page, re.DOTALL)
        (tmp_path / "hits.py").write_text(block)
        monkeypatch.syspath_prepend(str(tmp_path))
        point = EntryPoint("hits", "hits:HITS", CRITERIA.group)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])
        monkeypatch.delitem(vars(CRITERIA), "entries", raising=False)
        yield
        vars(CRITERIA).pop("entries", None)

    def test_its_option_counts(self, folder: Path) -> None:
        losses = {
            top: run("three-to-one.yaml", margin=f"hits=1:top={top}", max_tokens=800)
            .rows["loss"]
            .item()
            for top in (1, 300)
        }
        assert losses[300] == 0.0, "all tokens are among the 300 of the vocabulary"
        assert losses[1] != 0.0
        with pytest.raises(UserError, match="criterion hits has no option 'best'; it has top"):
            run("full.yaml", margin="hits=1:best=3")
        with pytest.raises(UserError, match="top=0: it must be at least 1"):
            run("full.yaml", margin="hits=1:top=0")

    def test_it_reads_separate_documents(self, blocks: TokenBlocks) -> None:
        """Tokens see their own document alone, and those that begin one do not count."""
        model = decisive_model()
        half = np.arange(32) // 16
        begins = np.tile(np.diff(half, prepend=-1) > 0, (len(blocks), 1))
        document = (2 * np.arange(len(blocks))[:, None] + half).astype(np.int32)
        infos = tuple(DocumentInfo(str(index), "a", str(index)) for index in range(2 * len(blocks)))
        text = TokenBlocks(
            blocks.tokens, document, infos, boundaries=SeparateDocuments(), begins=begins
        )
        rounds = CRITERIA["hits"].with_options({"top": 1}).prepare(Setting(model, None, text))
        rows = torch.from_numpy(blocks.tokens[0].reshape(2, 16).astype(np.int64))
        with torch.no_grad():
            hits = model(rows).logits[:, :-1].argmax(-1) == rows[:, 1:]
        assert rounds.measure(0, model, {}).tolist() == pytest.approx([hits.double().mean().item()])

    def test_help_and_page_name_it(self) -> None:
        assert criteria_help().endswith(
            "hits: drop of the share of next tokens among the top ones, in percentage points"
        )
        assert options_help().endswith(
            "Options of hits: top: Number of tokens that count as hits. Default: 5."
        )
        assert card_title("hits") == "Hit rate"
