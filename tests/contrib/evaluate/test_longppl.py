"""Test LongPPL: key tokens, agreement with the authors' package, the table, and the command."""

from __future__ import annotations

import copy
import json
import math
import random
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from helpers import fails, gated, tiny_model
from paths import TESTS
from task_cases import hybrid
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spkv_nas import set_gate_mode
from spkv_nas.artifacts.result_tables import LONGPPL
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.contrib.evaluate.longppl import reading, stage
from spkv_nas.contrib.evaluate.longppl.reading import (
    Criterion,
    LongText,
    Reading,
    key_spans,
    key_tokens,
    read,
    stretches,
)
from spkv_nas.contrib.evaluate.longppl.stage import longppl_table
from spkv_nas.data.sources import Document
from spkv_nas.data.tokenizer import train_bpe
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.loss import token_nll

GOLDEN = json.loads((TESTS / "golden" / "longppl.json").read_text())


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load("embedded:dense", dtype=torch.float32)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["post_processor"] = None  # the package puts BOS before the first window alone
    return model.eval(), PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend))
    )


class TestPackage:
    """Values equal those of the package longppl 0.3.0 (golden/make_longppl.py)."""

    def letters(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend["model"]["merges"] = []
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))

    @pytest.mark.parametrize("golden", GOLDEN["texts"], ids=["first", "second", "third"])
    def test_the_same_tokens_are_key_and_as_likely(
        self, golden: dict[str, Any], loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]
    ) -> None:
        model, tokenizer = loaded
        spans = key_spans(
            model, tokenizer, golden["text"], Criterion(GOLDEN["short"], GOLDEN["stride"])
        )
        assert spans == [tuple(span) for span in golden["spans"]]
        for name, judged in (("own", tokenizer), ("by_letter", self.letters(tokenizer))):
            actual, expected = read(model, judged, golden["text"], spans), golden[name]
            assert (actual.num_keys, actual.num_tokens + 1) == (
                expected["n_key_token"],
                expected["n_token"],
            )
            assert math.exp(actual.key_total / actual.num_keys) == pytest.approx(
                expected["longppl"], rel=1e-5
            )
            assert math.exp(actual.total / actual.num_tokens) == pytest.approx(
                expected["ppl"], rel=1e-5
            )


def copying(monkeypatch: pytest.MonkeyPatch, context: int = 4) -> PreTrainedModel:
    """Return a model that repeats whatever followed the last ``context`` tokens before, and is otherwise uniform."""
    model = tiny_model(vocab_size=300)

    def forward(input_ids: Tensor, **_: Any) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, 300)
        for row, ids in enumerate(input_ids.tolist()):
            seen: dict[tuple[int, ...], int] = {}
            for position in range(context, len(ids) + 1):
                after = seen.get(tuple(ids[position - context : position]))
                if after is not None:
                    logits[row, position - 1, after] = 20.0
                if position < len(ids):
                    seen[tuple(ids[position - context : position])] = ids[position]
        return SimpleNamespace(logits=logits)

    monkeypatch.setattr(model, "forward", forward)
    return model


class TestKeys:
    @pytest.mark.parametrize("stride", [1, 7, 32, 500])
    def test_tokens_repeated_from_afar_are_key(
        self, stride: int, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two of three random strings are repeated, one of them within the short context."""
        rng = random.Random(1)

        def noise(length: int) -> str:
            return "".join(
                rng.choice(string.ascii_uppercase + string.digits) for _ in range(length)
            )

        far, once, near = noise(20), noise(20), noise(20)
        text = far + noise(100) + once + near + noise(10) + near + noise(60) + far + noise(40)
        at = text.rindex(far)
        limit = 60 + stride  # of the short context, from where the far string is seen again
        result = key_spans(copying(monkeypatch), tiny_tokenizer, text, Criterion(60, stride))
        assert result == ([(at + 4, at + 20)] if limit < at else [])

    def test_thresholds(
        self, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The short context costs a copied letter log 300 nats and the other letters nothing."""
        model = copying(monkeypatch)
        text = "ABCDEFGH" + string.digits * 3 + "ABCDEFGH"
        cost = math.log(300)
        assert key_spans(model, tiny_tokenizer, text, Criterion(20, 5, alpha=cost - 0.01)) == [
            (42, 46)
        ]
        assert key_spans(model, tiny_tokenizer, text, Criterion(20, 5, alpha=cost + 0.01)) == []
        assert key_spans(model, tiny_tokenizer, text, Criterion(20, 5, beta=-1e-9)) == []
        assert key_spans(model, tiny_tokenizer, text, Criterion(46, 5)) == []

    def test_a_token_lies_inside_a_span_or_is_none(self) -> None:
        offsets = [(0, 2), (2, 4), (4, 5), (5, 9), (9, 10), (10, 12)]
        assert key_tokens(offsets, [(0, 5), (8, 11)]) == [0, 1, 3]
        assert key_tokens(offsets, []) == []

    def test_passes_may_be_few_at_once(
        self, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text, criterion = string.ascii_letters * 4, Criterion(20, 6, alpha=0.0, beta=-100.0)
        whole = key_spans(tiny_model(vocab_size=300), tiny_tokenizer, text, criterion)
        monkeypatch.setattr(reading, "_TOGETHER", 1)
        assert key_spans(tiny_model(vocab_size=300), tiny_tokenizer, text, criterion) == whole != []

    def test_the_density_is_the_texts(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        model = gated()
        for tau, share in ((0.0, 1.0), (0.4, None)):
            set_gate_mode(model, "hard", tau)
            result = read(model, tiny_tokenizer, string.ascii_letters, [(3, 9)])
            assert result.num_keys == 6
            assert result.density == share if share else 0.05 < result.density < 0.95
        assert read(hybrid(), tiny_tokenizer, string.ascii_letters, []).density == 0.5

    def test_long_documents_are_read_in_chunks(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """A document or remainder no longer than the short context is left out."""
        documents = [Document(string.ascii_uppercase * n, "text", str(n)) for n in (4, 1, 5, 3)]
        result = stretches(documents, tiny_tokenizer, 40, 26, None)
        assert [(one.document, one.name, len(one.text)) for one in result] == [
            (0, "4", 40),
            (0, "4", 40),
            (2, "5", 40),
            (2, "5", 40),
            (2, "5", 40),
            (3, "3", 40),
            (3, "3", 38),
        ]
        assert result[1].text == (string.ascii_uppercase * 4)[40:80]

    @pytest.mark.parametrize(
        ("most", "lengths"), [(81, [40, 40]), (110, [40, 40, 30]), (80, [40, 40]), (26, [])]
    )
    def test_no_more_tokens_are_read_than_the_limit(
        self, most: int, lengths: list[int], tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """``--max-tokens`` bounds the tokens read, although documents are read whole."""
        documents = [Document(string.ascii_uppercase * n, "text", str(n)) for n in (4, 1, 5, 3)]
        assert [
            len(one.text) for one in stretches(documents, tiny_tokenizer, 40, 26, most)
        ] == lengths


@pytest.mark.parametrize("prefix", [False, True])
def test_no_text_is_too_long_or_ends_within_a_character(
    tiny_tokenizer: PreTrainedTokenizerBase, prefix: bool
) -> None:
    """Cut at the offset of a token, texts repeated a character of several tokens and were longer than the limit.

    A tokenizer that begins a text with a space adds a token to a text that begins within a word.
    """
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=prefix)
    text = "\U0001f98a\U0001f43b\u4f60\u597dA" * 30
    parts = [part.text for part in stretches([Document(text, "text", "0")], tokenizer, 40, 4, None)]
    assert "".join(parts) == text
    assert {len(tokenizer(part)["input_ids"]) for part in parts[:-1]} <= set(range(36, 41))
    # A character of more tokens is left out
    assert [
        part.text
        for part in stretches([Document("ab\U0001f98acd", "text", "0")], tokenizer, 3, 1, None)
    ] == [
        "ab",
        "cd",
    ]
    # A model of another tokenizer may need more tokens than it has positions
    with pytest.raises(UserError, match="longer than the model's table of 16 positions"):
        read(
            tiny_model("gpt2", vocab_size=300, max_position_embeddings=16), tokenizer, parts[0], []
        )
    # The key tokens of a character are one span
    spans = key_spans(
        tiny_model(vocab_size=300), tokenizer, text[:20], Criterion(4, 2, alpha=-1e6, beta=-1e6)
    )
    assert [span[1] for span in spans] == [20]


def test_sequences_begin_as_the_tokenizer_begins_a_text(
    tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short contexts, too. BOS has no loss of its own, and key tokens keep their places."""
    text = "the fox jumps over the lazy dog, " * 6
    with_bos = train_bpe([text], 262, bos=True)
    bos, plain = with_bos.bos_token_id, with_bos(text, add_special_tokens=False)["input_ids"]
    model, seen = tiny_model(vocab_size=400), []

    def recorded(model: PreTrainedModel, tokens: Tensor) -> Tensor:
        seen.append(tokens.tolist())
        return token_nll(model, tokens)

    monkeypatch.setattr(reading.loss, "token_nll", recorded)
    criterion = Criterion(8, 4, alpha=-1e6, beta=-1e6)
    assert key_spans(model, with_bos, text, criterion) == [
        (len(with_bos.decode(plain[:8])), len(text))
    ]
    assert len(seen) > 2
    assert all(row[0] == bos and bos not in row[1:] for rows in seen for row in rows)
    assert {len(row) for rows in seen for row in rows[:1]} >= {1 + 12, 1 + len(plain)}
    result = read(model, with_bos, text, [(0, len(text))])
    assert seen[-1] == [[bos, *plain]]
    assert (result.num_tokens, result.num_keys) == (len(plain) - 1,) * 2
    with torch.no_grad():
        expected = token_nll(model, torch.tensor([[bos, *plain]]))[0, 1:]
        assert not torch.allclose(token_nll(model, torch.tensor([plain]))[0], expected, atol=1e-4)
    assert result.total == pytest.approx(float(expected.double().sum()), rel=1e-6)
    assert [
        len(with_bos(one.text)["input_ids"])
        for one in stretches([Document(text, "text", "0")], with_bos, 12, 8, None)
    ][:1] == [12]
    # Tokenizers that begin a text with nothing read the text alone
    read(model, tiny_tokenizer, text, [])
    assert seen[-1] == [tiny_tokenizer(text)["input_ids"]]


def texts(*documents: int, domains: str = "") -> list[LongText]:
    return [LongText(n, domains[n] if domains else "code", str(n), "") for n in documents]


class TestTable:
    def test_errors_are_by_document_and_paired(self) -> None:
        readings = [
            Reading(300.0, 150, 60.0, 50, 0.5),
            Reading(100.0, 50, 20.0, 40, 0.1),
            Reading(200.0, 100, 66.0, 60, 0.3),
        ]
        other = [
            Reading(330.0, 150, 50.0, 50, 1.0),
            Reading(90.0, 50, 16.0, 40, 1.0),
            Reading(200.0, 100, 60.0, 60, 1.0),
        ]
        rows, withheld = longppl_table(texts(0, 0, 1), pd.DataFrame(readings), pd.DataFrame(other))
        assert list(rows.columns) == LONGPPL.header
        assert not withheld
        (row,) = rows.itertuples()
        assert (row.domain, row.num_documents, row.num_tokens, row.num_keys) == ("all", 2, 300, 150)
        mean, difference = 146 / 150, 20 / 150
        assert row.longppl == pytest.approx(math.exp(mean))
        assert row.ppl == pytest.approx(math.exp(2.0))
        assert row.density == pytest.approx((0.5 * 150 + 0.1 * 50 + 0.3 * 100) / 300)
        assert (row.against, row.against_ppl) == pytest.approx(
            (math.exp(126 / 150), math.exp(620 / 300))
        )
        residuals = np.array([80 - mean * 90, 66 - mean * 60])
        assert row.standard_error == pytest.approx(
            row.longppl * math.sqrt(2 * (residuals**2).sum()) / 150
        )
        residuals = np.array([14 - difference * 90, 6 - difference * 60])
        ratio = 100 * math.exp(difference)
        assert row.difference_percent == pytest.approx(ratio - 100)
        assert row.difference_standard_error == pytest.approx(
            ratio * math.sqrt(2 * (residuals**2).sum()) / 150
        )

    def test_few_keys_give_no_value(self) -> None:
        """Each domain is judged separately; plain perplexity is always reported."""
        readings = pd.DataFrame(
            [Reading(300.0, 150, 60.0, 99, 0.5), Reading(100.0, 50, 20.0, 1, 0.1)]
        )
        rows, withheld = longppl_table(texts(0, 1, domains="ab"), readings, readings)
        assert list(rows["domain"]) == ["all", "a", "b"]
        assert withheld == {
            "a": "LongPPL is not reported: found 99 key tokens, but at least 100 are needed",
            "b": "LongPPL is not reported: found 1 key tokens, but at least 100 are needed",
        }
        assert list(rows["longppl"].notna()) == [True, False, False]
        values = [
            "longppl",
            "standard_error",
            "against",
            "difference_percent",
            "difference_standard_error",
        ]
        assert rows.loc[1:, values].isna().all(axis=None)
        assert list(rows["num_keys"]) == [100, 99, 1]
        assert rows[["ppl", "against_ppl"]].notna().all(axis=None)
        none, _ = longppl_table(texts(0), pd.DataFrame([Reading(3.0, 2, 0.0, 0, 0.5)]))
        assert none["longppl"].isna().all()


class TestCommand:
    @pytest.fixture
    def any_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A random model's long context makes about half of all tokens likelier."""
        monkeypatch.setattr("spkv_nas.contrib.evaluate.longppl.reading.LONGPPL_ALPHA", 0.0)
        monkeypatch.setattr("spkv_nas.contrib.evaluate.longppl.reading.LONGPPL_BETA", -1000.0)

    @pytest.mark.usefixtures("any_key")
    def test_two_checkpoints(
        self,
        checkpoint: Path,
        tmp_path: Path,
        text: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        save(hybrid(), tiny_tokenizer, tmp_path / "hybrid")
        workspace = tmp_path / "w"
        others = ["--against", str(tmp_path / "hybrid"), "--evaluator", str(checkpoint)]
        command = ["evaluate", "longppl", "--model", str(checkpoint), "--data", str(text), *others]
        command += ["-w", str(workspace)]
        main(command)
        output = " ".join(capsys.readouterr().out.split())
        assert "LongPPL" in output
        assert "longppl.csv" in output
        folder = workspace / "reports" / "mine"
        rows = pd.read_csv(folder / "longppl.csv")
        assert list(rows.columns) == LONGPPL.header
        assert rows.loc[0, "num_documents"] == 10
        assert rows.loc[0, "num_keys"] > 100
        assert rows["longppl"].notna().all()
        assert rows["density"].between(0.05, 0.95).all()
        assert rows.loc[0, "against_density"] == 0.5
        origin = yaml.safe_load((folder / "longppl.yaml").read_text())
        settings = {
            key: origin[key]
            for key in ("tau", "short", "stride", "alpha", "beta", "block_size", "withheld")
        }
        assert settings == {
            "tau": 0.4,
            "short": 32,
            "stride": 8,
            "alpha": 0.0,
            "beta": -1000.0,
            "block_size": 128,
            "withheld": {},
        }
        assert origin["evaluator"]["model"] == str(checkpoint)
        assert origin["against"]["model"] == str(tmp_path / "hybrid")
        kept = sorted((workspace / "runs" / "mine" / "longppl").iterdir())
        assert [file.name.split("-")[0] for file in kept] == ["keys", "nll", "nll"]
        line = json.loads(kept[0].read_text().splitlines()[0])
        assert (line["text"], line["name"].endswith("0.txt"), len(line["keys"])) == (
            0,
            True,
            len(line["spans"]),
        )
        for name in ("read", "key_spans"):
            monkeypatch.setattr(stage, name, lambda *_, **__: pytest.fail("the text is read again"))
        main(command)  # reads nothing again
        assert pd.read_csv(folder / "longppl.csv").equals(rows)

    def test_few_key_tokens_are_reported(
        self, checkpoint: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(
            [
                "evaluate",
                "longppl",
                "--model",
                str(checkpoint),
                "--data",
                str(text),
                "-w",
                str(tmp_path / "w"),
            ]
        )
        shown = capsys.readouterr()
        assert (
            "all: LongPPL is not reported: found 0 key tokens, but at least 100 are needed"
            in shown.out + shown.err
        )
        assert "nan" not in shown.out
        record = yaml.safe_load((tmp_path / "w" / "reports" / "mine" / "longppl.yaml").read_text())
        assert record["withheld"] == {
            "all": "LongPPL is not reported: found 0 key tokens, but at least 100 are needed"
        }

    @pytest.mark.filterwarnings("ignore:sequences of")  # the checkpoint has 128 positions
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--tau", "2"], "--tau must lie in [0, 1]"),
            (
                ["--short-context", "128"],
                "the short context (128 tokens) must be shorter than a text (128 tokens)",
            ),
            (
                ["--short-context", "900", "--context", "1000"],
                "no document is longer than the short context",
            ),
            (
                ["--short-context", "90", "--max-tokens", "80"],
                "--max-tokens 80 must exceed the short context",
            ),
            (["--context", "100000"], "more than 16 times as long"),
            (["--samples", "5"], "No such option: --samples"),
        ],
        ids=" ".join,
    )
    def test_invalid_options(
        self,
        options: list[str],
        message: str,
        checkpoint: Path,
        tmp_path: Path,
        text: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        error = fails(
            capsys,
            "evaluate",
            "longppl",
            "--model",
            checkpoint,
            "--data",
            text,
            *options,
            "-w",
            tmp_path / "w",
        )
        assert message in error

    @pytest.mark.usefixtures("any_key")
    def test_a_pair_needs_one_tokenizer_and_an_evaluator_none(
        self, checkpoint: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save(hybrid(), train_bpe(["another text entirely"] * 3, 270), tmp_path / "other")
        options = [
            "evaluate",
            "longppl",
            "--model",
            checkpoint,
            "--data",
            text,
            "-w",
            tmp_path / "w",
        ]
        assert "has a different tokenizer" in fails(
            capsys, *options, "--against", tmp_path / "other"
        )
        main([str(one) for one in (*options, "--evaluator", tmp_path / "other")])
        assert (
            pd.read_csv(tmp_path / "w" / "reports" / "mine" / "longppl.csv").loc[0, "num_keys"]
            > 100
        )
