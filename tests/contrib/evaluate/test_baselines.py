"""Test KV-cache compression baselines: scores equal kvpress's, the protocol holds, and the command reports errors."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from data.test_separate_documents import TEXTS, alone
from family_cases import SHARED, SLOW
from helpers import BLOCK, equal_up_to_rounding, fails, gated, logits, sharpen_attention, tiny_model
from model.test_unequal_heads import SLOW as UNEQUAL_SLOW
from model.test_unequal_heads import UNEQUAL
from paths import TESTS
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import sdpa_mask

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import BASELINES
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.contrib.evaluate.baselines import rules as eviction
from spkv_nas.contrib.evaluate.baselines.expected_attention import (
    ExpectedAttention,
    Rotation,
    expected_attention,
)
from spkv_nas.contrib.evaluate.baselines.kvzap import KVzap, fit_kvzap, kvzip_scores, predictor
from spkv_nas.contrib.evaluate.baselines.options import EXACT, KVPRESS, METHODS
from spkv_nas.contrib.evaluate.baselines.rules import (
    Chunk,
    Protocol,
    Read,
    Rule,
    heavy_hitters,
    pruned_nll,
)
from spkv_nas.contrib.evaluate.baselines.stage import measure_sp_kv
from spkv_nas.data.blocks import TokenBlocks, build_blocks
from spkv_nas.data.tokenizer import train_bpe
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.model.attention import hooked_layers, layer_state, watch_logits
from spkv_nas.model.checkpoint import save
from spkv_nas.model.gates import keeps
from spkv_nas.model.modes import gate_mode
from spkv_nas.model.windows import apply_layout

GOLDEN = TESTS / "golden" / "baselines.npz"
WINDOW, SINKS = 6, 2


def protocol(kind: str = EXACT, sinks: int = SINKS) -> Protocol:
    return Protocol(WINDOW, sinks, chunk=4, kind=kind)


def untrained_kvzap(model: PreTrainedModel) -> KVzap:
    """Return networks that distinguish keys without being trained."""
    torch.manual_seed(3)
    return KVzap([predictor(32, 2) for _ in range(model.config.num_hidden_layers)], 0.0, 0)


def rules(model: PreTrainedModel, how: Protocol, density: float = 0.4) -> dict[str, Rule]:
    """Return every method for which a threshold can be set in advance."""
    return {
        "streaming": eviction.streaming(how),
        "random": eviction.random_keys(how, density, seed=0),
        "kvzap": untrained_kvzap(model).rule(how, 0.05),
        "h2o": heavy_hitters(how, density),
        "expected-attention": expected_attention(how, density, Rotation.of(model, BLOCK)),
    }


class TestKvpress:
    """Scores of whole prompts equal those of kvpress 0.5.5 (tests/golden/make_baselines.py)."""

    @pytest.fixture
    def golden(self) -> dict[str, Tensor]:
        with np.load(GOLDEN) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    @pytest.fixture
    def read(self, golden: dict[str, Tensor]) -> Read:
        hidden, q, k, v = (golden[name][None] for name in ("hidden", "q", "k", "v"))
        return Read(
            0,
            0,
            0,
            hidden,
            q.unflatten(1, (len(k[0]), -1)),
            k[:, :, None],
            v[:, :, None],
            q.shape[-1] ** -0.5,
        )

    def test_observed_attention(
        self, golden: dict[str, Tensor], read: Read, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        length = read.keys_shape[2]
        everything = Protocol(length, 0, chunk=16)
        monkeypatch.setattr(eviction, "ranking", lambda *given: given)
        *_, score, see = heavy_hitters(everything, 1.0)(read)
        eviction.chunked_attention(read, everything, lambda _chunk: torch.empty(0), see)
        scores = score(Chunk(length, length, 0), torch.empty(0))[0]
        assert scores.numpy() == pytest.approx(golden["observed"].numpy(), abs=1e-6)

    @pytest.mark.parametrize("sinks", [0, 4])
    def test_expected_attention(self, sinks: int, golden: dict[str, Tensor], read: Read) -> None:
        length = read.keys_shape[2]
        rotation = Rotation(golden["cos"].double(), golden["sin"].double())
        held = torch.ones(read.keys_shape, dtype=torch.bool)
        expected = ExpectedAttention(read, rotation, sinks)
        expected.scores(Chunk(16, 20, 0), held[..., :16])  # statistics come in parts
        scores = expected.scores(Chunk(length, length, 0), held)[0, :, sinks:]
        expected = golden[f"expected_{sinks}"][:, sinks:].numpy()
        assert scores.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    def test_kvzip(self, golden: dict[str, Tensor], read: Read) -> None:
        expected = golden["kvzip"]
        # As values of another size
        padded = (torch.nn.functional.pad(x, (0, 3)) for x in (read.q, read.k, read.v))
        for each in (read._replace(**dict(zip("qkv", padded, strict=True))), read):
            scores, out = kvzip_scores(each, golden["output"], expected.shape[-1])
            assert scores[0].numpy() == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-6)
        k, v = (x.expand_as(read.q) for x in (read.k, read.v))
        dense = torch.nn.functional.scaled_dot_product_attention(read.q, k, v, is_causal=True)
        torch.testing.assert_close(out, dense, atol=1e-5, rtol=1e-5)

    def test_network_of_kvzap(self, golden: dict[str, Tensor], read: Read) -> None:
        network = predictor(32, 2)
        for layer, name in ((network[0], "zap_up"), (network[-1], "zap_down")):
            layer.weight.data, layer.bias.data = golden[name], golden[f"{name}_bias"]
        scores = KVzap([network], 0.0, 0).scores(read)[0].detach()
        assert scores.numpy() == pytest.approx(golden["zap"].numpy(), abs=1e-6)


class TestProtocol:
    @pytest.mark.parametrize("kind", [EXACT, KVPRESS])
    @pytest.mark.parametrize("method", METHODS)
    def test_a_later_token_does_not_change_earlier_ones(self, method: str, kind: str) -> None:
        model = tiny_model()
        tokens = torch.randint(97, (1, BLOCK), generator=torch.Generator().manual_seed(1))
        rule = rules(model, protocol(kind))[method]
        with eviction.reading(model) as read:
            read.rule = rule
            before = logits(model, tokens)
            for changed in (13, 22, 30):
                other = torch.where(torch.arange(BLOCK) < changed, tokens, (tokens + 1) % 97)
                after = logits(model, other)
                assert equal_up_to_rounding(after[:, :changed], before[:, :changed])
                assert not equal_up_to_rounding(after[:, changed], before[:, changed])

    def test_a_native_window_of_all_layers_must_hold_a_block(self) -> None:
        tokens = torch.randint(97, (2, BLOCK))
        for native in (BLOCK, BLOCK - 1):
            with eviction.reading(model := tiny_model("mistral", sliding_window=native)) as read:
                read.rule = heavy_hitters(protocol(), 1.0)
                if native == BLOCK:
                    torch.testing.assert_close(
                        logits(model, tokens), logits(tiny_model("mistral"), tokens)
                    )
                else:
                    with pytest.raises(
                        UserError, match="longer than the model's own sliding window"
                    ):
                        logits(model, tokens)


class ExplicitPruning:
    """Attention under the explicit mask of a method, made query by query in the layer whose keys are read."""

    def __init__(self, method: str, how: Protocol, lengths: list[list[int]]) -> None:
        self.method, self.how, self.lengths = method, how, lengths  # of the documents in each row
        self.masks: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # keys; visible and near ones, bool [B, Hkv, T, T]

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scaling
        if number := module.pruned_heads:
            if all(keys is not k for keys, *_ in self.masks):
                self.masks.append(
                    (k, *self._visible(scores.view(len(q), number, -1, *scores.shape[2:])))
                )
            (mask,) = (mask for keys, mask, _ in self.masks if keys is k)
            mask = mask.repeat_interleave(q.shape[1] // number, 1)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).transpose(
            1, 2
        ).contiguous(), None

    def _visible(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return which keys each query sees, and sees anyway, from scores [B, Hkv, G, T, T]."""
        visible, near = torch.zeros(2, *scores[:, :, 0].shape, dtype=torch.bool)
        documents = [
            (row, *part)
            for row, n in enumerate(self.lengths)
            for part in pairwise(accumulate([0, *n]))
        ]
        for row, first, stop in documents:
            held, received = visible.new_ones(scores.shape[1], stop - first), 0.0
            if self.method == "random":
                outside = self.how.num_outside(stop - first)
                share = 1.0 - min(
                    1.0, 0.6 * int(outside.sum()) / max(int(outside[SINKS:].sum()), 1)
                )
                draw = np.random.default_rng([0, len(self.masks), row, first]).random(held.shape)
                held = torch.from_numpy(draw < share) | (torch.arange(stop - first) < SINKS)
            for t in range(stop - first):
                start, part = t - t % self.how.chunk, slice(first, first + t + 1)
                if t == start and self.method != "random":
                    ends = min(t + self.how.chunk, stop - first) if self.how.kind == EXACT else t
                    self._evict(held, received, t, ends - WINDOW)
                age = torch.arange(t, -1, -1)
                near[row, :, first + t, part] = age < (
                    WINDOW if self.how.kind == EXACT else WINDOW + t - start + 1
                )
                visible[row, :, first + t, part] = near[row, :, first + t, part] | held[:, : t + 1]
                hidden = ~visible[row, :, None, first + t, first:stop]
                weights = (
                    scores[row, :, :, first + t, first:stop]
                    .masked_fill(hidden, -torch.inf)
                    .softmax(-1)
                )
                received = received + weights.mean(1)
        return visible, near

    def _evict(self, held: Tensor, received: Any, num_seen: int, edge: int) -> None:
        """Evict keys before ``edge`` of ``held`` [Hkv, T], by the attention that they ``received`` from each query."""
        for head in range(len(held)):
            share = {
                s: float(received[head, s]) / (num_seen - s) for s in range(edge) if held[head, s]
            }
            order = sorted(share, key=lambda s: (s >= SINKS, -share[s]))
            held[
                head,
                order[SINKS if self.method == "streaming" else max(round(0.4 * edge), SINKS) :],
            ] = False


PRUNED = {
    "gemma4_text": SHARED | {"global_head_dim": 8},
    "gemma3n_text": SLOW["gemma3n_text"],
    "llama": {},
}


@pytest.mark.parametrize("is_packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("kind", [EXACT, KVPRESS])
@pytest.mark.parametrize("method", ["streaming", "random", "h2o"])
@pytest.mark.parametrize(
    "family", [*PRUNED, "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"]
)
def test_rules_equal_an_explicit_mask(family: str, method: str, kind: str, is_packed: bool) -> None:
    """Keys are dropped for all layers that read them, and for all heads of a latent; documents are read alone."""
    model = sharpen_attention(
        tiny_model(family, **(UNEQUAL | UNEQUAL_SLOW | PRUNED)[family]), 4.0
    ).double()
    model.set_experts_implementation("eager")  # others take no float64
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    how = protocol(kind)
    lengths = [[23, 17], [3, 1, 20, 16]] if is_packed else [[40], [40]]
    position = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    inputs = {"input_ids": tokens, "use_cache": False, "position_ids": position}
    with eviction.reading(model) as read, torch.no_grad():
        read.rule = {
            "streaming": eviction.streaming(how),
            "random": eviction.random_keys(how, 0.4, seed=0),
            "h2o": heavy_hitters(how, 0.4),
        }[method]
        actual = model(**inputs).logits
        num_pairs = read.num_pairs(how).tolist()
        for layer in hooked_layers(model).values():
            state = layer_state(layer)
            layer.pruned_heads = 0 if state.is_always_local else state.num_kv_heads  # type: ignore[assignment]
    explicit = ExplicitPruning(method, how, lengths)
    AttentionInterface.register("explicit-pruning", explicit)
    AttentionMaskInterface.register("explicit-pruning", sdpa_mask)
    model.set_attn_implementation("explicit-pruning")
    with torch.no_grad():
        expected = model(**inputs).logits
    assert torch.allclose(actual, expected, atol=1e-6 * float(expected.abs().max()))
    # Count the pairs outside the window
    start = position - torch.arange(40)
    same = ((start[:, :, None] == start[:, None]) & torch.ones(40, 40).tril().bool())[:, None]
    kept = sum(int((visible & ~near).sum()) for _, visible, near in explicit.masks)
    assert num_pairs == [kept, sum(int((same & ~near).sum()) for *_, near in explicit.masks)]


class TestSeparateDocuments:
    """Documents of a block that do not see each other are read as if each were alone."""

    @pytest.fixture
    def blocks(self) -> TokenBlocks:
        texts = ["; ".join(TEXTS[i : i + 3]) for i in range(len(TEXTS))]
        return build_blocks(texts, train_bpe(texts, 300, bos=True), 2 * BLOCK, documents="separate")

    @pytest.mark.parametrize("kind", [EXACT, KVPRESS])
    @pytest.mark.parametrize("method", ["streaming", "kvzap", "h2o", "expected-attention"])
    def test_pruned_nll(self, method: str, kind: str, blocks: TokenBlocks) -> None:
        model, how = sharpen_attention(tiny_model(vocab_size=300), 4.0), protocol(kind)
        rule = rules(model, how)[method]
        nll, _ = pruned_nll(model, blocks, rule, how, batch_size=3)
        with eviction.reading(model) as read, torch.inference_mode():
            read.rule = rule
            assert (nll.total.sum(), nll.num_tokens.sum()) == pytest.approx(
                alone(model, blocks), rel=1e-6
            )
        assert np.abs(nll.total - document_nll(model, blocks).total).max() > 0.02

    def test_thresholds_reach_the_density(self, blocks: TokenBlocks) -> None:
        model, how = tiny_model(vocab_size=300), protocol(sinks=0)
        zap = untrained_kvzap(model)
        rule = zap.rule(how, zap.threshold(model, blocks, how, 0.4, batch_size=4))
        assert pruned_nll(model, blocks, rule, how)[1] == pytest.approx(0.4, abs=0.03)

    def test_rows_of_gates(self, blocks: TokenBlocks) -> None:
        """Open gates equal the ungated model; at a threshold, pairs are counted in each document."""
        model = gated()
        (opened, half), window = (
            measure_sp_kv(model, blocks, [0.4], batch_size=3),
            model.config.spkv["gates"]["window"],
        )
        assert opened.density == 1.0
        assert opened.nll.mean == pytest.approx(
            document_nll(tiny_model(vocab_size=300), blocks).mean, rel=1e-6
        )
        assert half.nll.total != pytest.approx(opened.nll.total, rel=1e-4)
        counts: list[tuple[int, int]] = []

        def count(_layer: int, logits: Tensor, _text: Tensor) -> None:
            weights = (logits.shape[2] - window - torch.arange(logits.shape[2])).clamp(min=0)
            counts.append((int((keeps(logits, 0.4) * weights).sum()), 2 * int(weights.sum())))

        with gate_mode(model, "hard", 0.4), watch_logits(model, count), torch.inference_mode():
            expected = alone(model, blocks)
        assert (half.nll.total.sum(), half.nll.num_tokens.sum()) == pytest.approx(
            expected, rel=1e-5
        )
        assert half.density == pytest.approx(np.divide(*np.sum(counts, 0)), abs=1e-3)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("method", ["random", "kvzap", "h2o", "expected-attention"])
def test_density_is_the_requested_one(method: str, sinks: int, blocks: TokenBlocks) -> None:
    model, how, blocks = tiny_model(vocab_size=300), Protocol(4, sinks, chunk=2), blocks.cut(96)
    rule = rules(model, how, 0.3)[method]
    if method == "kvzap":
        zap = untrained_kvzap(model)
        rule = zap.rule(how, zap.threshold(model, blocks, how, 0.3, batch_size=2))
    assert pruned_nll(model, blocks, rule, how, batch_size=2)[1] == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_kvzap_learns(
    family: str,
    blocks: TokenBlocks,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spkv_nas.contrib.evaluate.baselines.kvzap.PROMPT", "\n")
    model = tiny_model(family, **(UNEQUAL | PRUNED)[family], vocab_size=300)
    zap = fit_kvzap(model, tiny_tokenizer, blocks, seed=0, batch_size=4)
    assert 0.05 < zap.explained < 1.0  # of text that it was not fitted on; 135 tokens are few
    again = fit_kvzap(model, tiny_tokenizer, blocks, seed=0, batch_size=4)
    assert again.explained == zap.explained
    assert not any(
        parameter.requires_grad for one in zap.predictors for parameter in one.parameters()
    )
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("family", ["smollm3", "deepseek_v2"])
def test_a_model_whose_queries_are_not_rotated_by_halves(family: str) -> None:
    with pytest.raises(UserError, match="expected-attention needs"):
        Rotation.of(tiny_model(family, **UNEQUAL_SLOW.get(family, {})), BLOCK)


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
        options = ["--model", dense, "--data", text, "--context", 128, "--sinks", "0,2"]
        options += [
            "--against",
            checkpoint,
            "--taus",
            "0.6,0.7",
            "--density",
            "30%,0.2",
            "-w",
            tmp_path / "w",
        ]
        main(["evaluate", "baselines", *map(str, options)])
        folder = tmp_path / "w" / "reports" / "dense"
        kinds = ("csv", "yaml", "png", "svg", "pdf")
        assert {p.name for p in folder.glob("[!.]*")} == {f"baselines.{kind}" for kind in kinds}
        rows = pd.read_csv(folder / "baselines.csv")
        assert list(rows.columns) == BASELINES.header
        chosen = [method for method in METHODS if method != "streaming" for _ in range(2)]
        assert rows["method"].tolist() == [
            "full-attention",
            *["streaming"] * 2,
            *chosen,
            *chosen,
            *["sp-kv"] * 3,
        ]
        targeted = rows.dropna(subset=["target_density"])
        assert targeted["density"].to_numpy() == pytest.approx(
            targeted["target_density"].to_numpy(), abs=0.03
        )
        assert rows["tau"].tolist()[-3:] == [0.0, 0.6, 0.7]
        record = yaml.safe_load((folder / "baselines.yaml").read_text())
        assert (record["window"], record["chunk"], record["protocol"]) == (6, 6, "exact")
        assert record["kvzap"]["tokens"] > 0
        assert "expected-attention" in capsys.readouterr().out

    def test_a_single_method(
        self, dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A method without thresholds is printed."""
        options = [
            "--model",
            dense,
            "--data",
            text,
            "--context",
            BLOCK,
            "--methods",
            "streaming",
            "--sinks",
            "0,2",
        ]
        main(
            [
                "evaluate",
                "baselines",
                *map(str, options),
                "--protocol",
                "kvpress",
                "-w",
                str(tmp_path / "w"),
            ]
        )
        assert "│ streaming │ 2 " in " ".join(capsys.readouterr().out.replace("│", " │ ").split())
        rows = pd.read_csv(tmp_path / "w" / "reports" / "dense" / "baselines.csv")
        assert rows["density"].tolist() == [1.0, 0.0, pytest.approx(rows["density"][2])]
        assert 0.0 < rows["density"][2] < 0.5

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("--density 0", "--density must lie in (0, 1]; found '0'"),
            ("--density nan", "found 'nan'"),
            (
                "--window 31 --sinks 4",
                "32 tokens have no keys to prune beyond a window of 31 keys and 4 sinks",
            ),
            ("--protocol mine --window 20", "--protocol must be exact or kvpress; found 'mine'"),
        ],
    )
    def test_bad_input(
        self,
        options: str,
        message: str,
        dense: Path,
        text: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        arguments = [
            "--model",
            dense,
            "--data",
            text,
            "--context",
            str(BLOCK),
            "--methods",
            "streaming",
        ]
        assert message in fails(
            capsys, "evaluate", "baselines", *arguments, *options.split(), "-w", tmp_path / "w"
        )
        assert not list(tmp_path.rglob("*.csv"))

    def test_refused_models_and_text(
        self,
        dense: Path,
        checkpoint: Path,
        text: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        hybrid = tiny_model(vocab_size=300)
        apply_layout(hybrid, Layout(("GL", "LL", "LL", "GG"), window=6))
        save(hybrid, AutoTokenizer.from_pretrained(dense), tmp_path / "hybrid")
        for model, options, problem in (
            (checkpoint, [], "the model has SP-KV gates"),
            (tmp_path / "hybrid", [], "the model is a hybrid"),
            (
                dense,
                ["--max-tokens", "24"],
                "--max-tokens 24 keeps 24 tokens, all of a single document",
            ),
            (dense, ["--against", dense], "has no gates"),
            (
                dense,
                ["--against", checkpoint, "--window", "8"],
                "differs from the window of --against, 6",
            ),
        ):
            command = [
                "evaluate",
                "baselines",
                "--model",
                model,
                "--data",
                text,
                "--context",
                "24",
                *options,
            ]
            assert problem in fails(
                capsys, *command, "--methods", "streaming", "-w", tmp_path / "w"
            )
