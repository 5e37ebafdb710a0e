"""Test KV-cache compression baselines: scores equal kvpress's, the protocol holds, and the command reports errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from helpers import BLOCK, fails, gated, logits, tiny_model
from paths import TESTS
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import BASELINES
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.contrib.evaluate.baselines import rules as eviction
from spkv_nas.contrib.evaluate.baselines.expected_attention import ExpectedAttention, Rotation, expected_attention
from spkv_nas.contrib.evaluate.baselines.kvzap import KVzap, fit_kvzap, kvzip_scores, predictor
from spkv_nas.contrib.evaluate.baselines.options import EXACT, KVPRESS, METHODS
from spkv_nas.contrib.evaluate.baselines.rules import Chunk, Protocol, Read, Rule, chunked_attention, heavy_hitters
from spkv_nas.contrib.evaluate.baselines.stage import measure_sp_kv, pruned_nll
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import document_nll, evaluate
from spkv_nas.model.checkpoint import save
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing.density import probe

GOLDEN = TESTS / "golden" / "baselines.npz"
WINDOW, SINKS = 6, 2


def protocol(kind: str = EXACT, sinks: int = SINKS) -> Protocol:
    return Protocol(WINDOW, sinks, chunk=4, kind=kind)


def untrained_kvzap(model: PreTrainedModel) -> KVzap:
    """Return networks that distinguish keys without being trained."""
    torch.manual_seed(3)
    return KVzap([predictor(32, 2) for _ in range(model.config.num_hidden_layers)], 0.0, 0)


def rules(model: PreTrainedModel, kind: str = EXACT, density: float = 0.4) -> dict[str, Rule]:
    """Return every method for which a threshold can be set in advance."""
    how = protocol(kind)
    return {
        "streaming": eviction.streaming(how),
        "random": eviction.random_keys(how, density, seed=0),
        "kvzap": untrained_kvzap(model).rule(how, 0.05),
        "h2o": heavy_hitters(how, density),
        "expected-attention": expected_attention(how, density, Rotation.of(model, BLOCK)),
    }


def read_by(model: PreTrainedModel, rule: Rule, tokens: Tensor) -> Tensor:
    with eviction.reading(model) as read:
        read.rule = rule
        return logits(model, tokens)


class TestKvpress:
    """Scores of whole prompts equal those of kvpress 0.5.5 (tests/golden/make_baselines.py)."""

    @pytest.fixture
    def golden(self) -> dict[str, Tensor]:
        with np.load(GOLDEN) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    @pytest.fixture
    def read(self, golden: dict[str, Tensor]) -> Read:
        hidden, q, k, v = (golden[name][None] for name in ("hidden", "q", "k", "v"))
        return Read(0, 0, hidden, q, k, v, q.shape[-1] ** -0.5)

    def test_observed_attention(self, golden: dict[str, Tensor], read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
        length = read.k.shape[2]
        everything = Protocol(length, 0, chunk=16)
        monkeypatch.setattr(eviction, "ranking", lambda *given: given)
        *_, score, see = heavy_hitters(everything, 1.0)(read)
        chunked_attention(read.q, read.k, read.v, read.scale, everything, lambda _chunk: torch.empty(0), see)
        scores = score(Chunk(length, length, 0), torch.empty(0))[0]
        assert scores.numpy() == pytest.approx(golden["observed"].numpy(), abs=1e-6)

    @pytest.mark.parametrize("sinks", [0, 4])
    def test_expected_attention(self, sinks: int, golden: dict[str, Tensor], read: Read) -> None:
        length = read.k.shape[2]
        rotation = Rotation(golden["cos"].double(), golden["sin"].double())
        held = torch.ones(read.k.shape[:3], dtype=torch.bool)
        expected = ExpectedAttention(read, rotation, sinks)
        expected.scores(Chunk(16, 20, 0), held[..., :16])  # statistics come in parts
        scores = expected.scores(Chunk(length, length, 0), held)[0, :, sinks:]
        expected = golden[f"expected_{sinks}"][:, sinks:].numpy()
        assert scores.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    def test_kvzip(self, golden: dict[str, Tensor], read: Read) -> None:
        expected = golden["kvzip"]
        scores, out = kvzip_scores(read, golden["output"], expected.shape[-1])
        assert scores[0].numpy() == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-6)
        dense = torch.nn.functional.scaled_dot_product_attention(
            read.q, read.k, read.v, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out, dense, atol=1e-5, rtol=1e-5)

    def test_network_of_kvzap(self, golden: dict[str, Tensor], read: Read) -> None:
        network = predictor(32, 2)
        for layer, name in ((network[0], "zap_up"), (network[-1], "zap_down")):
            layer.weight.data, layer.bias.data = golden[name], golden[f"{name}_bias"]
        scores = KVzap([network], 0.0, 0).scores(read)[0].detach()
        assert scores.numpy() == pytest.approx(golden["zap"].numpy(), abs=1e-6)


class TestProtocol:
    @pytest.mark.parametrize("kind", [EXACT, KVPRESS])
    def test_keys_visible_to_a_query(self, kind: str) -> None:
        """Values encode positions and all keys are equal, so the output shows which keys a query attends to."""
        length, how = 22, protocol(kind)
        keep = torch.rand(1, 2, length, generator=torch.Generator().manual_seed(0)) < 0.4
        keep[..., :SINKS] = True
        q, k = torch.zeros(1, 4, length, length), torch.zeros(1, 2, length, length)
        v = torch.eye(length).expand(1, 2, -1, -1)
        out, kept = eviction.keeping(Read(0, 0, q, q, k, v, 1.0), how, keep)
        seen, pairs = out > 0, 0
        for t in range(length):
            first = t - WINDOW + 1 if kind == EXACT else t // 4 * 4 - WINDOW
            for head in range(2):
                expected = [s for s in range(t + 1) if s >= first or keep[0, head, s]]
                pairs += sum(s < first for s in expected)
                for query_head in (2 * head, 2 * head + 1):
                    assert seen[0, query_head, t].nonzero().flatten().tolist() == expected
        assert int(kept) == pairs

    @pytest.mark.parametrize("method", ["streaming", "random", "kvzap"])
    def test_one_pass_equals_chunks(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The operator's single pass equals the loop over chunks that other methods need."""
        model, tokens = tiny_model(), torch.randint(97, (2, BLOCK), generator=torch.Generator().manual_seed(1))
        rule = rules(model)[method]
        one = read_by(model, rule, tokens)

        def chunks(read: Read, how: Protocol, keep: Tensor) -> tuple[Tensor, Tensor]:
            keep = keep | (torch.arange(keep.shape[-1]) < how.sinks)
            return chunked_attention(read.q, read.k, read.v, read.scale, how, lambda chunk: keep[..., : chunk.edge])

        monkeypatch.setattr("spkv_nas.contrib.evaluate.baselines.rules.keeping", chunks)
        torch.testing.assert_close(read_by(model, rule, tokens), one, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("kind", [EXACT, KVPRESS])
    @pytest.mark.parametrize("method", METHODS)
    def test_a_later_token_does_not_change_earlier_ones(self, method: str, kind: str) -> None:
        model, tokens = tiny_model(), torch.randint(97, (1, BLOCK), generator=torch.Generator().manual_seed(1))
        rule = rules(model, kind)[method]
        before = read_by(model, rule, tokens)
        for changed in (13, 22, 30):
            other = tokens.clone()
            other[0, changed:] = (tokens[0, changed:] + 1) % 97
            after = read_by(model, rule, other)
            torch.testing.assert_close(after[:, :changed], before[:, :changed], atol=0, rtol=0)
            assert not torch.equal(after[:, changed], before[:, changed])

    @pytest.mark.parametrize("kind", [EXACT, KVPRESS])
    @pytest.mark.parametrize("method", ["random", "h2o", "expected-attention"])
    def test_all_keys_kept_is_the_dense_model(self, method: str, kind: str) -> None:
        model, tokens = tiny_model(), torch.randint(97, (2, BLOCK), generator=torch.Generator().manual_seed(1))
        dense = logits(model, tokens)
        pruned = read_by(model, rules(model, kind, 1.0)[method], tokens)
        torch.testing.assert_close(pruned, dense, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(read_by(model, rules(model, kind, 0.2)[method], tokens), dense, atol=1e-3)

    def test_layers_local_by_design_are_unchanged(self) -> None:
        model, tokens = tiny_model("gemma3_text"), torch.randint(97, (2, BLOCK))
        with eviction.reading(model) as read:
            assert len(read.layers) == 2
            read.rule = heavy_hitters(protocol(), 1.0)
            torch.testing.assert_close(logits(model, tokens), logits(tiny_model("gemma3_text"), tokens))
            read.rule = eviction.streaming(protocol())
            assert not torch.allclose(logits(model, tokens), logits(tiny_model("gemma3_text"), tokens), atol=1e-3)

    def test_a_native_window_of_all_layers_must_hold_a_block(self) -> None:
        tokens = torch.randint(97, (2, BLOCK))
        for native in (BLOCK, BLOCK - 1):
            with eviction.reading(model := tiny_model("mistral", sliding_window=native)) as read:
                assert read.num_heads == 8
                read.rule = heavy_hitters(protocol(), 1.0)
                if native == BLOCK:
                    torch.testing.assert_close(logits(model, tokens), logits(tiny_model("mistral"), tokens))
                else:
                    with pytest.raises(UserError, match="longer than the model's own sliding window"):
                        logits(model, tokens)

    def test_evicted_keys_do_not_come_back(self) -> None:
        model, tokens = tiny_model(), torch.randint(97, (1, BLOCK), generator=torch.Generator().manual_seed(1))
        held: list[Tensor] = []
        original = eviction.ranking

        def watching(
            read: Read, how: Protocol, density: float, scores: Callable[..., Tensor], see: Callable[..., None]
        ) -> tuple[Tensor, Tensor]:
            def watched(chunk: Chunk, before: Tensor) -> Tensor:
                held.append(before.clone())
                return scores(chunk, before)

            return original(read, how, density, watched, see)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("spkv_nas.contrib.evaluate.baselines.rules.ranking", watching)
            read_by(model, heavy_hitters(protocol(), 0.3), tokens)
        first, *later = held[: len(held) // model.config.num_hidden_layers]
        assert first.all()
        for now in later:
            assert not (now[..., : first.shape[-1]] & ~first).any()
            first = now
        assert not first.all()


class TestDensity:
    @pytest.mark.parametrize("sinks", [0, 2])
    @pytest.mark.parametrize("method", ["random", "kvzap", "h2o", "expected-attention"])
    def test_density_is_the_requested_one(self, method: str, sinks: int, blocks: TokenBlocks) -> None:
        model, how = tiny_model(vocab_size=300), Protocol(4, sinks, chunk=2)
        long = blocks.cut(96)
        zap = untrained_kvzap(model)
        made = {
            "random": lambda: eviction.random_keys(how, 0.3, seed=0),
            "kvzap": lambda: zap.rule(how, zap.threshold(model, long, how, 0.3, batch_size=2)),
            "h2o": lambda: heavy_hitters(how, 0.3),
            "expected-attention": lambda: expected_attention(how, 0.3, Rotation.of(model, 96)),
        }
        _, density = pruned_nll(model, long, made[method](), how, batch_size=2)
        assert density == pytest.approx(0.3, abs=0.01)

    def test_batches_change_nothing(self, blocks: TokenBlocks) -> None:
        model = tiny_model(vocab_size=300)
        for rule in rules(model).values():
            one, all_ = (pruned_nll(model, blocks, rule, protocol(), batch_size=size) for size in (1, 8))
            assert one[0].total == pytest.approx(all_[0].total, rel=1e-5)
            assert one[1] == pytest.approx(all_[1], abs=1e-3)

    def test_rows_of_gates(self, blocks: TokenBlocks) -> None:
        """Open gates equal the ungated model; at a threshold, results equal those of ``evaluate`` and ``probe``."""
        model = gated()
        opened, half = measure_sp_kv(model, blocks, [0.4])
        assert opened.density == 1.0
        assert opened.nll.mean == pytest.approx(document_nll(tiny_model(vocab_size=300), blocks).mean, rel=1e-6)
        assert half.density == pytest.approx(probe(model, blocks, 0.4).mean, abs=0.1)
        assert half.nll.total == pytest.approx(evaluate(model, blocks, 0.4).nll.total)
        assert half.nll.total != pytest.approx(opened.nll.total, rel=1e-4)


def test_kvzap_learns(
    blocks: TokenBlocks, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spkv_nas.contrib.evaluate.baselines.kvzap.PROMPT", "\n")
    model = tiny_model(vocab_size=300)
    zap = fit_kvzap(model, tiny_tokenizer, blocks, seed=0, batch_size=4)
    assert 0.05 < zap.explained < 1.0  # of text that it was not fitted on; 135 tokens are few
    again = fit_kvzap(model, tiny_tokenizer, blocks, seed=0, batch_size=4)
    assert again.explained == zap.explained
    assert not any(parameter.requires_grad for one in zap.predictors for parameter in one.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_whose_queries_are_not_rotated_by_halves() -> None:
    with pytest.raises(UserError, match="expected-attention needs"):
        Rotation.of(tiny_model("smollm3"), BLOCK)


class TestCommand:
    @pytest.fixture
    def dense(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
        save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "dense")
        return tmp_path / "dense"

    @pytest.mark.slow
    def test_all_methods(
        self,
        dense: Path,
        checkpoint: Path,
        text: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        options = ["--model", dense, "--data", text, "--block-size", 128, "--sinks", "0,2"]
        options += ["--against", checkpoint, "--taus", "0.6,0.7", "--density", "30%,0.2", "-w", tmp_path / "w"]
        main(["evaluate", "baselines", *map(str, options)])
        folder = tmp_path / "w" / "reports" / "dense"
        assert {p.name for p in folder.glob("[!.]*")} == {
            f"baselines.{kind}" for kind in ("csv", "yaml", "png", "svg", "pdf")
        }
        rows = pd.read_csv(folder / "baselines.csv")
        assert list(rows.columns) == BASELINES.header
        chosen = [method for method in METHODS if method != "streaming" for _ in range(2)]
        assert rows["method"].tolist() == ["full-attention", *["streaming"] * 2, *chosen, *chosen, *["sp-kv"] * 3]
        targeted = rows.dropna(subset=["target_density"])
        assert targeted["density"].to_numpy() == pytest.approx(targeted["target_density"].to_numpy(), abs=0.03)
        assert rows["tau"].tolist()[-3:] == [0.0, 0.6, 0.7]
        record = yaml.safe_load((folder / "baselines.yaml").read_text())
        assert (record["window"], record["chunk"], record["protocol"]) == (6, 6, "exact")
        assert record["kvzap"]["tokens"] > 0
        assert "expected-attention" in capsys.readouterr().out

    def test_a_single_method(self, dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A method without thresholds is printed."""
        options = ["--model", dense, "--data", text, "--block-size", BLOCK, "--methods", "streaming", "--sinks", "0,2"]
        main(["evaluate", "baselines", *map(str, options), "--protocol", "kvpress", "-w", str(tmp_path / "w")])
        assert "│ streaming │ 2 " in " ".join(capsys.readouterr().out.replace("│", " │ ").split())
        rows = pd.read_csv(tmp_path / "w" / "reports" / "dense" / "baselines.csv")
        assert rows["density"].tolist() == [1.0, 0.0, pytest.approx(rows["density"][2])]
        assert 0.0 < rows["density"][2] < 0.5

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ["--methods", "h2o,snapkv"],
                "unknown method 'snapkv' in --methods; choose from streaming, random, kvzap,",
            ),
            (["--density", "0"], "--density must lie in (0, 1]; found '0'"),
            (["--density", "20%,120%"], "found '120%'"),
            (["--density", "nan"], "found 'nan'"),
            (["--sinks", "four"], "--sinks must be whole numbers of tokens; found 'four'"),
            (["--taus", "0.5,0.6"], "--taus needs --against"),
            (
                ["--window", "31", "--sinks", "4"],
                "blocks of 32 tokens have no keys to prune beyond a window of 31 keys and 4 sinks",
            ),
            (["--protocol", "mine", "--window", "20"], "--protocol must be exact or kvpress; found 'mine'"),
        ],
    )
    def test_bad_input(
        self,
        options: list[str],
        message: str,
        dense: Path,
        text: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        arguments = ["--model", dense, "--data", text, "--block-size", str(BLOCK), "--methods", "streaming"]
        assert message in fails(capsys, "evaluate", "baselines", *arguments, *options, "-w", tmp_path / "w")
        assert not list(tmp_path.rglob("*.csv"))

    def test_a_model_that_is_pruned_already(
        self, text: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hybrid = tiny_model(vocab_size=300)
        apply_layout(hybrid, Layout(("GL", "LL", "LL", "GG"), window=6))
        for model, problem in ((gated(), "the model has SP-KV gates"), (hybrid, "the model is a hybrid")):
            folder = tmp_path / problem[-4:]
            save(model, tiny_tokenizer, folder)
            options = ["--model", folder, "--data", text, "--block-size", str(BLOCK), "-w", tmp_path / "w"]
            error = fails(capsys, "evaluate", "baselines", *options)
            assert problem in error

    def test_reference_rows(
        self,
        dense: Path,
        checkpoint: Path,
        text: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        options = ["--model", dense, "--data", text, "--block-size", str(BLOCK), "-w", tmp_path / "w"]
        assert "has no gates" in fails(capsys, "evaluate", "baselines", *options, "--against", dense)
        message = fails(capsys, "evaluate", "baselines", *options, "--against", checkpoint, "--window", "8")
        assert "--window 8 differs from the window of --against, 6" in message

    def test_one_document(self, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "one.txt").write_text("a word " * 12)
        options = ["--model", dense, "--data", tmp_path / "one.txt", "--block-size", "24", "--methods", "streaming"]
        message = fails(capsys, "evaluate", "baselines", *options, "-w", tmp_path / "w")
        assert "document" in message
