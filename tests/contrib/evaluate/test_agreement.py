"""Test agreement and acceptance: against speculative decoding as it runs, the table, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import fails, logits, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import AGREEMENT
from spkv_nas.base.statistics import jackknife_ratio, unseen_share
from spkv_nas.cli import main
from spkv_nas.contrib.evaluate.agreement.stage import (
    GREEDY,
    SAMPLED,
    Agreement,
    agreement_table,
    compare,
    expected_passes,
)
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.evaluation.continuations import predict, write_continuations
from spkv_nas.model.checkpoint import save
from spkv_nas.model.generation import continue_tokens
from spkv_nas.model.windows import apply_layout

LAYOUT = Layout(("GG", "GG", "GL", "GG"), window=8)
BLOCK, NEW = 28, 16


def dense() -> PreTrainedModel:
    """Make a model whose predictions are not nearly uniform, and that never ends a text by itself."""
    model = tiny_model(vocab_size=300)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = 300  # no token
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(4.0)
    return model


def hybrid() -> PreTrainedModel:
    model = dense()
    apply_layout(model, LAYOUT)
    return model


def blocks(number: int = 6) -> TokenBlocks:
    tokens = np.random.default_rng(0).integers(3, 300, (number, BLOCK)).astype(np.int32)
    document = np.repeat(np.arange(number) // 2, BLOCK).reshape(number, BLOCK).astype(np.int32)
    infos = tuple(
        DocumentInfo(str(index), "a", f"text-{index}") for index in range((number + 1) // 2)
    )
    return TokenBlocks(tokens, document, infos)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float
) -> tuple[Agreement, list[list[int]]]:
    reader = dense()
    texts = write_continuations(reader, tokenizer, blocks(), NEW, temperature=temperature)
    lines = compare(model, reader, blocks(), texts, NEW, temperature=temperature)
    assert [line["document"] for line in lines] == [0, 0, 1, 1, 2, 2]
    assert lines[2]["name"] == "text-1"
    return Agreement.of(lines, temperature), [line["tokens"] for line in texts]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_model_agrees_with_itself_exactly(
    tiny_tokenizer: PreTrainedTokenizerBase, temperature: float
) -> None:
    result, _ = measure(dense(), tiny_tokenizer, temperature)
    for values in (result.equal, result.accepted, result.kept):
        assert (values == 1.0).all()
    rows = agreement_table({GREEDY: result}, [3])
    assert rows.loc[0, ["agreement", "acceptance", "tokens_per_pass"]].tolist() == [1.0, 1.0, 4.0]
    assert rows.loc[0, "agreement_standard_error"] == pytest.approx(unseen_share(3) / 1.96)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_two_predictions_give_what_compare_gives(
    tiny_tokenizer: PreTrainedTokenizerBase, temperature: float
) -> None:
    expected, texts = measure(hybrid(), tiny_tokenizer, temperature)
    lines = [
        {
            "block": block,
            "document": 0,
            "name": "",
            "tokens": tokens[: NEW - block],
        }  # of unequal lengths
        for block, tokens in enumerate(texts)
    ]
    ours, theirs = (
        predict(model, blocks(), lines, NEW, temperature=temperature)
        for model in (hybrid(), dense())
    )
    for block, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        length = NEW - block
        assert (mine["block"], len(mine["predicted"])) == (block, length)
        difference = np.array(mine["predicted"]) - np.array(other["predicted"])
        scores = difference == 0 if temperature == 0 else np.exp(np.minimum(difference, 0.0))
        assert scores == pytest.approx(expected.kept[block, :length], abs=1e-5)


def test_samples_of_later_blocks_are_those_of_all_blocks(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Texts that are continued in parts, each with the number of blocks before it."""
    whole = write_continuations(dense(), tiny_tokenizer, blocks(), NEW, temperature=1.0)
    later = replace(blocks(), tokens=blocks().tokens[4:], document=blocks().document[4:])
    part = write_continuations(dense(), tiny_tokenizer, later, NEW, temperature=1.0, first=4)
    assert [line["tokens"] for line in part] == [line["tokens"] for line in whole[4:]]


class TestGreedy:
    @pytest.mark.parametrize("draft_tokens", [1, 3])
    def test_passes_are_those_of_speculative_decoding(
        self, tiny_tokenizer: PreTrainedTokenizerBase, draft_tokens: int
    ) -> None:
        """Draft, verify and correct with both models until the continuation is written, and count the passes."""
        result, texts = measure(hybrid(), tiny_tokenizer, 0.0)
        assert 0.1 < result.equal.mean() < 0.9
        draft_model, model = hybrid(), dense()
        for row, text in enumerate(texts):
            tokens, num_passes = blocks().tokens[row, : BLOCK - NEW].tolist(), 0
            while len(tokens) < BLOCK:
                drafted = list(tokens)
                for _ in range(draft_tokens):
                    drafted.append(
                        int(logits(draft_model, torch.tensor([drafted]))[0, -1].argmax())
                    )
                verified = logits(model, torch.tensor([drafted]))[0].argmax(-1).tolist()
                num_passes += 1
                while (
                    len(tokens) < len(drafted) and drafted[len(tokens)] == verified[len(tokens) - 1]
                ):
                    tokens.append(drafted[len(tokens)])
                tokens.append(verified[len(tokens) - 1])
            assert tokens[BLOCK - NEW : BLOCK] == text
            assert expected_passes(result.kept[row : row + 1], draft_tokens)[0] == num_passes

    def test_the_first_difference_is_where_the_model_itself_departs(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        result, texts = measure(hybrid(), tiny_tokenizer, 0.0)
        prompts = torch.from_numpy(blocks().tokens[:, : BLOCK - NEW].astype(np.int64))
        for row, tokens in enumerate(
            continue_tokens(hybrid(), tiny_tokenizer, prompts, torch.ones_like(prompts), NEW)
        ):
            pairs = zip(tokens, texts[row], strict=True)
            first = next(
                (number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), NEW
            )
            assert (result.equal[row, :first] == 1.0).all()
            assert first == NEW or result.equal[row, first] == 0.0


class TestSampled:
    def test_acceptance_is_that_of_the_rule(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """Draw tokens from q and accept each with probability min(1, p / q)."""
        result, texts = measure(hybrid(), tiny_tokenizer, 0.7)
        rng = np.random.default_rng(0)
        for row in range(2):
            prompt = blocks().tokens[row, : BLOCK - NEW].tolist()
            tokens = torch.tensor([[*prompt, *texts[row]]])
            p, q = (
                (logits(model, tokens)[0].double() / 0.7).softmax(-1).numpy()
                for model in (dense(), hybrid())
            )
            for position in (0, 7, NEW - 1):
                at = BLOCK - NEW - 1 + position
                drawn = rng.choice(300, size=20_000, p=q[at] / q[at].sum())
                accepted = rng.random(20_000) < np.minimum(1.0, p[at, drawn] / q[at, drawn])
                error = max(accepted.std(), 0.01) / np.sqrt(20_000)
                assert result.accepted[row, position] == pytest.approx(
                    accepted.mean(), abs=4 * error
                )
                token = texts[row][position]
                assert result.kept[row, position] == pytest.approx(
                    min(1.0, q[at, token] / p[at, token]), rel=1e-3
                )

    def test_a_sample_does_not_depend_on_its_batch(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        prompts = torch.randint(3, 300, (5, 6), generator=torch.Generator().manual_seed(0))
        seen, seeds = torch.ones_like(prompts), [(1, row) for row in range(5)]
        together = continue_tokens(
            dense(), tiny_tokenizer, prompts, seen, 8, temperature=1.0, seeds=seeds
        )
        for row in range(5):
            one = slice(row, row + 1)
            alone = continue_tokens(
                dense(),
                tiny_tokenizer,
                prompts[one],
                seen[one],
                8,
                temperature=1.0,
                seeds=seeds[one],
            )
            assert alone == [together[row]]

    def test_samples_have_the_models_distribution(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        prompt, number = torch.tensor([[5, 9, 17]]), 2000
        prompts = prompt.expand(number, -1)
        seeds = [(0, row) for row in range(number)]
        model = dense()
        drawn = continue_tokens(
            model,
            tiny_tokenizer,
            prompts,
            torch.ones_like(prompts),
            1,
            temperature=0.5,
            seeds=seeds,
        )
        share = np.bincount([token for (token,) in drawn], minlength=300) / number
        expected = (logits(model, prompt)[0, -1].double() / 0.5).softmax(-1).numpy()
        errors = np.sqrt(expected * (1 - expected) / number)
        assert (np.abs(share - expected) <= 4.5 * errors + 1 / number).all()
        assert expected.max() > 0.05

    def test_expected_passes_are_the_mean_of_speculative_sampling(self) -> None:
        """Run the algorithm on two Markov chains, and compare its mean number of passes with that of samples of p."""
        rng = np.random.default_rng(0)
        p, q = (rng.dirichlet(np.full(4, 0.7), size=4) for _ in range(2))
        length, draft_tokens, number = 12, 3, 4000
        counts = [_speculative_passes(p, q, length, draft_tokens, rng) for _ in range(number)]
        kept = np.empty((number, length))
        for row in kept:
            token = 0
            for position in range(length):
                before, token = token, int(rng.choice(4, p=p[token]))
                row[position] = min(1.0, q[before, token] / p[before, token])
        expected = expected_passes(kept, draft_tokens)
        error = np.hypot(np.std(counts), expected.std()) / np.sqrt(number)
        assert error < 0.06
        assert expected.mean() == pytest.approx(np.mean(counts), abs=3.5 * error)


def _speculative_passes(
    p: np.ndarray, q: np.ndarray, length: int, draft_tokens: int, rng: np.random.Generator
) -> int:
    """Write ``length`` tokens by speculative sampling (Leviathan et al., algorithm 1), and count the passes of p."""
    token, written, num_passes = 0, 0, 0
    while written < length:
        num_passes += 1
        for _ in range(draft_tokens):
            drafted = int(rng.choice(4, p=q[token]))
            written += 1
            if rng.random() >= min(1.0, p[token, drafted] / q[token, drafted]):
                rest = np.maximum(p[token] - q[token], 0.0)
                token = int(rng.choice(4, p=rest / rest.sum()))
                break
            token = drafted
        else:
            token = int(rng.choice(4, p=p[token]))
            written += 1
    return num_passes


class TestTable:
    lines = (
        {"document": 0, "equal": [1, 0, 1, 1], "accepted": [0.5] * 4, "kept": [1.0, 0.5, 1.0, 0.5]},
        {"document": 0, "equal": [1, 1], "accepted": [0.5] * 2, "kept": [0.0, 0.0]},
        {"document": 3, "equal": [0, 1, 1], "accepted": [0.9] * 3, "kept": [1.0] * 3},
    )

    def test_rows_and_their_errors(self) -> None:
        results = {GREEDY: Agreement.of(self.lines, 0.0), SAMPLED: Agreement.of(self.lines, 1.0)}
        rows = agreement_table(results, [1, 2])
        assert rows.columns.tolist() == AGREEMENT.header
        assert rows["decoding"].tolist() == [GREEDY, GREEDY, SAMPLED, SAMPLED]
        assert (rows[["num_documents", "num_prompts", "num_tokens"]] == [2, 3, 9]).all(axis=None)
        share, error = jackknife_ratio(np.array([5.0, 2.0]), np.array([6, 3]))
        assert rows.loc[0, ["agreement", "agreement_standard_error"]].tolist() == pytest.approx(
            [share, error]
        )
        assert rows.loc[0, "acceptance"] == rows.loc[0, "agreement"]
        assert rows.loc[2, "acceptance"] == pytest.approx((0.5 * 6 + 0.9 * 3) / 9)
        # Greedy with one draft: [1 0] [1 1]; [1 1]; [0] [1 1]
        assert rows.loc[0, "tokens_per_pass"] == pytest.approx(9 / (2 + 1 + 2))
        # Greedy with two drafts: [1 0] [1 1]; [1 1]; [0] [1 1]
        assert rows.loc[1, "tokens_per_pass"] == pytest.approx(9 / (2 + 1 + 2))

    def test_passes_of_a_text_without_accepted_drafts(self) -> None:
        assert expected_passes(np.zeros((1, 7)), 4).tolist() == [7.0]

    def test_an_end_of_text_ends_the_count(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """A continuation that ends early has fewer tokens, and its padding is not compared."""
        reader = dense()
        first = continue_tokens(
            reader, tiny_tokenizer, torch.tensor([[5, 9, 17, 4]]), torch.ones(1, 4), 6
        )[0]
        assert reader.generation_config is not None
        reader.generation_config.eos_token_id = first[2]
        ended = continue_tokens(
            reader, tiny_tokenizer, torch.tensor([[5, 9, 17, 4]]), torch.ones(1, 4), 6
        )[0]
        assert ended == first[: first.index(first[2]) + 1]
        short = [
            {"block": row, "document": 0, "name": "", "tokens": [7] * (row + 1)} for row in range(6)
        ]
        result = Agreement.of(compare(hybrid(), reader, blocks(), short, NEW, temperature=1.0), 1.0)
        assert result.num_tokens.tolist() == [1, 2, 3, 4, 5, 6]
        assert np.isfinite(expected_passes(result.kept, 2)).all()


def _unexpected(*_args: object, **_options: object) -> None:
    pytest.fail("computed again")


class TestCommand:
    @pytest.fixture
    def arguments(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> list[str]:
        save(hybrid(), tiny_tokenizer, tmp_path / "hybrid")
        save(dense(), tiny_tokenizer, tmp_path / "dense")
        (tmp_path / "text").mkdir()
        for number in range(4):
            (tmp_path / "text" / f"{number}.txt").write_text(
                f"the quick brown fox {number} jumps over " * 12
            )
        options = ["--data", tmp_path / "text", "--context", 32, "--workspace", tmp_path / "w"]
        return ["evaluate", "agreement", "--model", str(tmp_path / "hybrid"), *map(str, options)]

    def test_table_and_reuse(
        self,
        arguments: list[str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        against = [*arguments, "--against", str(tmp_path / "dense"), "--name", "mine"]
        main(against)
        printed = " ".join(capsys.readouterr().out.split())
        assert "greedy tokens" in printed
        assert "sampled at temperature 1" in printed
        table = tmp_path / "w" / "reports" / "mine" / "token-agreement.csv"
        rows = pd.read_csv(table)
        assert rows["draft_tokens"].tolist() == [1, 2, 4, 8] * 2
        assert rows["num_tokens"].nunique() == 1
        assert 0 < rows["agreement"].min() <= rows["acceptance"].max() < 1
        # A finished comparison is read, not computed again
        written = table.read_bytes()
        for name in (
            "evaluation.continuations.write_continuations",
            "contrib.evaluate.agreement.stage.compare",
        ):
            monkeypatch.setattr(f"spkv_nas.{name}", _unexpected)
        main(against)
        assert table.read_bytes() == written

    def test_a_checkpoint_against_itself(self, arguments: list[str], tmp_path: Path) -> None:
        main([*arguments, "--against", str(tmp_path / "hybrid"), "--name", "mine"])
        rows = pd.read_csv(tmp_path / "w" / "reports" / "mine" / "token-agreement.csv").query(
            "decoding == @GREEDY"
        )
        assert rows["agreement"].tolist() == [1.0] * 4
        assert rows["tokens_per_pass"].tolist() == pytest.approx([2.0, 16 / 6, 4.0, 8.0], rel=1e-5)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ((), "needs --against: the dense model"),
            (
                ("--against", "dense", "--new-tokens", "32"),
                "leaves no prompt in a block of 32 tokens",
            ),
            (
                ("--against", "larger"),
                "the model predicts 300 tokens and the dense model 320 (vocab_size)",
            ),
        ],
    )
    def test_what_is_refused(
        self,
        arguments: list[str],
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        capsys: pytest.CaptureFixture[str],
        options: tuple[str, ...],
        message: str,
    ) -> None:
        save(tiny_model(vocab_size=320), tiny_tokenizer, tmp_path / "larger")
        named = [
            str(tmp_path / option) if option in ("dense", "larger") else option
            for option in options
        ]
        assert message in fails(capsys, *arguments, *named)
