"""Test the other signals against a small direct computation from full attention matrices."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import fails, gated, tiny_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.model.attention import attention_layers, layer_states
from spkv_nas.model.checkpoint import save
from spkv_nas.model.windows import apply_layout, full_attention
from spkv_nas.probing import heads
from spkv_nas.probing.attention_mass import attention_mass
from spkv_nas.probing.duo import AlphaMixture, duo, sums_of_squares
from spkv_nas.probing.measure import measure_signal
from spkv_nas.probing.registry import SIGNALS, check_options
from spkv_nas.probing.retrieval import needles, retrieval

WINDOW, LENGTH = 6, 40
OTHER_SIGNALS = SIGNALS.names[1:]


@pytest.fixture
def blocks() -> TokenBlocks:
    """Token blocks: 6 of 40 tokens; 10 documents of 24 tokens in two domains, so that documents cross blocks."""
    tokens = np.random.default_rng(0).integers(3, 290, size=(6, LENGTH)).astype(np.int32)
    owner = np.repeat(np.arange(10, dtype=np.int32), 24).reshape(6, LENGTH)
    return TokenBlocks(tokens, owner, tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(10)))


def attentions(family: str, tokens: np.ndarray) -> np.ndarray:
    """Return attention float64 [L, N, Hq, T, T] of the dense model, by transformers' eager implementation."""
    model = tiny_model(family, vocab_size=300).double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(tokens.astype(np.int64)), output_attentions=True)
    return torch.stack(out.attentions).numpy()


def last_hidden(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state


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
        mass = (attentions(family, blocks.tokens) * far).sum(-1).reshape(4, 6, 2, 2, LENGTH).mean(3)  # [L, N, Hkv, T]
        assert 0.1 < mass[0].mean() < mass[1].mean() * 1.1 < 0.99
        if family == "gemma3_text":
            mass[::2] = 0
        chosen = np.broadcast_to(np.arange(LENGTH) >= window, (6, LENGTH))
        for domain, parity in (("a", 0), ("b", 1)):
            mine = chosen & (blocks.document % 2 == parity)
            values = mass.transpose(0, 2, 1, 3)[:, :, mine]
            assert table.domain_density(domain) == pytest.approx(
                values.mean(-1), abs=1e-7
            )  # transformers' softmax is in float32
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
            assert attention_mass(model, blocks, WINDOW).density == pytest.approx(expected, abs=1e-6)
            states = layer_states(model)
            assert [(s.settings, s.windows) for s in states] == before
            assert all(s.observer is None for s in states)


def texts_with_needles(blocks: TokenBlocks, window: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids int64 [N, T] and the needles' positions [N]."""
    rows, depth = needles(blocks, window, length, seed)
    return np.stack(list(rows)), depth


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
                assert LENGTH - length - at - 1 >= 12  # from a token of the repetition back to the one it copies
                assert np.array_equal(np.delete(row, slice(at, at + length))[:-length], text[: LENGTH - 2 * length])
                assert len(set(row[-length:])) == length
        assert not np.array_equal(texts_with_needles(blocks, 12, 8, 0)[0], texts_with_needles(blocks, 12, 8, 1)[0])
        assert needles(blocks, 25, 14, 0)[1].tolist() == [0] * 6  # there is one place left
        with pytest.raises(UserError, match="cannot hold a needle of 14 tokens"):
            needles(blocks, 26, 14, 0)

    @pytest.mark.parametrize("family", ["llama", "granite"])
    def test_is_the_attention_on_the_token_to_copy(self, family: str, blocks: TokenBlocks) -> None:
        table = retrieval(tiny_model(family, vocab_size=300), blocks, WINDOW, needle_length=8, batch_size=4, seed=3)
        tokens, depth = texts_with_needles(blocks, WINDOW, 8, 3)
        weights = attentions(family, tokens)
        queries = np.arange(LENGTH - 8, LENGTH - 1)
        scores = np.stack(
            [weights[:, i, :, queries, at + 1 + np.arange(7)] for i, at in enumerate(depth)]
        )  # [N,7,L,Hq]
        owner = blocks.document[:, queries]
        expected = scores.mean((0, 1)).reshape(4, 2, 2)
        assert table.density == pytest.approx(expected.max(-1), abs=1e-6)
        best = expected.argmax(-1)
        of_b = scores[owner % 2 == 1].mean(0).reshape(4, 2, 2)
        assert table.domain_density("b") == pytest.approx(
            np.take_along_axis(of_b, best[..., None], 2)[..., 0], abs=1e-6
        )

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
        assert retrieval(model, blocks, WINDOW, needle_length=8).metadata["copy_accuracy"] == round(4 / 7, 4)


class TestDuo:
    def value(self, alphas: Tensor, sinks: int = 0) -> float:
        return float(self.loss(alphas, sinks)[0].detach())

    def loss(self, alphas: Tensor, sinks: int = 0) -> tuple[Tensor, list[AlphaMixture]]:
        """Return the distillation loss of a float64 llama at the given alphas [4, 2]."""
        model = tiny_model(vocab_size=300).double()
        tokens = torch.randint(3, 290, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        with full_attention(model) as states:
            mixtures = [AlphaMixture(state, WINDOW, sinks, model.device) for state in states]
            for state, mixture, alpha in zip(states, mixtures, alphas, strict=True):
                state.observer = mixture
                mixture.share = alpha.double().clone().requires_grad_()
            error, full = sums_of_squares(model, mixtures, tokens)
            return error / full, mixtures

    def test_alpha_of_1_and_0_are_full_attention_and_the_local_layout(self) -> None:
        model = tiny_model(vocab_size=300).double()
        tokens = torch.randint(3, 290, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        full = last_hidden(model, tokens)
        for rows in (("LL",) * 4, ("GG", "GG", "GG", "LG")):
            apply_layout(model, Layout(rows, WINDOW))
            change = last_hidden(model, tokens) - full
            alphas = torch.tensor([[float(letter == "G") for letter in row] for row in rows])
            expected = float(change.square().mean() / full.square().mean())
            assert expected > 1e-4
            assert self.value(alphas) == pytest.approx(expected, rel=1e-5)  # the loss is in float32
        assert self.value(torch.ones(4, 2)) == 0.0

    def test_sinks_are_visible_to_local_heads(self) -> None:
        """Enough sinks to make every key visible turn the mixture into full attention at any alpha."""
        assert self.value(torch.zeros(4, 2), LENGTH) == pytest.approx(0.0, abs=1e-12)
        assert 0.0 < self.value(torch.zeros(4, 2), 3) != self.value(torch.zeros(4, 2))

    def test_alpha_has_the_gradient_of_the_mixture(self) -> None:
        """Central differences, with the full attention of the other pass held fixed."""
        alphas = torch.linspace(0.2, 0.9, 8).view(4, 2).double()
        loss, mixtures = self.loss(alphas)
        loss.backward()
        gradient = torch.stack([m.share.grad for m in mixtures if m.share.grad is not None])
        for layer, head in ((0, 0), (1, 1), (3, 0)):
            change = torch.zeros(4, 2).double()
            change[layer, head] = 1e-2
            slope = (self.value(alphas + change) - self.value(alphas - change)) / 2e-2
            assert float(gradient[layer, head]) == pytest.approx(slope, rel=2e-2)

    def test_an_unused_head_is_closed_first(self, blocks: TokenBlocks) -> None:
        model = tiny_model(vocab_size=300)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight *= 8.0
                layer.self_attn.o_proj.weight[:, 16:] = 0.0  # KV head 1
        seen: list[tuple[int, int]] = []
        table = duo(
            model,
            blocks,
            WINDOW,
            sinks=0,
            steps=40,
            learning_rate=0.1,
            regularisation=0.05,
            progress=lambda *step: seen.append(step),
        )
        assert seen == [(step, 40) for step in range(1, 41)]
        assert table.density[:, 1].max() == 0.0
        assert table.density[:, 0].min() > 0.3
        assert table.metadata["distillation_loss"] > 0.0
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        again = duo(model, blocks, WINDOW, sinks=0, steps=40, learning_rate=0.1, regularisation=0.05)
        assert np.array_equal(again.density, table.density)


class TestMeasure:
    @pytest.mark.filterwarnings("ignore:the model predicts:UserWarning")
    @pytest.mark.parametrize("signal", OTHER_SIGNALS)
    def test_takes_the_window_of_the_gates(self, signal: str, blocks: TokenBlocks, tmp_path: Path) -> None:
        """The table is read back as it was written, with values in [0, 1]."""
        metadata = {"model": "somewhere"}
        options: dict[str, Any] = {"steps": 2} if signal in ("duo", "head-gates") else {}
        if signal == "retrieval":
            blocks = TokenBlocks(*(x.reshape(3, 80) for x in (blocks.tokens, blocks.document)), blocks.documents)
        table = measure_signal(signal, gated(), blocks, name="mine", metadata=metadata, **options)
        assert table.window == 6
        assert 0.0 <= table.density.min() < table.density.max() <= 1.0
        table.write(tmp_path / "mine")
        read = HeadScores.read(tmp_path / "mine")
        assert read.density == pytest.approx(table.density, abs=1e-5)
        assert (read.name, read.signal, read.metadata["source"]) == ("mine", signal, "somewhere")
        assert (read.metadata["head_dim"], read.metadata["dtype"]) == (8, "float32")  # --kv-bytes needs them
        assert read.diagnosis() == []

    @pytest.mark.filterwarnings("ignore:the model predicts:UserWarning")
    def test_reported_cost(self, blocks: TokenBlocks) -> None:
        """Duo's 5 steps of 2 of 6 blocks are 10 / 6 of the text, each token forward twice and backward once."""
        model = tiny_model(vocab_size=300)
        tables = [attention_mass(model, blocks, WINDOW), retrieval(model, blocks, WINDOW, needle_length=8)]
        assert [(t.metadata["passes"], t.metadata["tokens"]) for t in tables] == [(1.0, 240), (1.0, 240)]
        assert duo(model, blocks, WINDOW, steps=5).metadata["passes"] == 5.0

    def test_invalid_inputs(self, blocks: TokenBlocks) -> None:
        model = tiny_model(vocab_size=300)
        for signal in OTHER_SIGNALS:
            with pytest.raises(UserError, match="no text"):
                measure_signal(signal, model, blocks.take(0))
            with pytest.raises(UserError, match="at least 1"):
                measure_signal(signal, model, blocks, window=0)
            with pytest.raises(UserError, match=r"window of 128 keys.*\n.*smaller --window, or a larger --block-size"):
                measure_signal(signal, model, blocks, window=128)
        with pytest.raises(UserError, match="steps must be at least 1"):
            measure_signal("duo", model, blocks, window=6, steps=0)
        with pytest.raises(
            UserError, match="--steps does not apply to --signal retrieval; it applies to density, head-gates"
        ):
            check_options("retrieval", steps=3)
        assert not attention_layers(model)


class TestCommand:
    @pytest.fixture
    def options(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> list[str]:
        save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "mine")
        (tmp_path / "text.txt").write_text("".join(f"the fox {(7 * i) % 31} jumps over {i}. " for i in range(60)))
        options = ["--model", tmp_path / "mine", "--data", tmp_path / "text.txt", "--block-size", 64]
        return [*map(str, options), "--workspace", str(tmp_path / "w")]

    @pytest.mark.filterwarnings("ignore:the model predicts:UserWarning")
    @pytest.mark.parametrize("signal", OTHER_SIGNALS)
    def test_layouts_follow_any_signal(
        self, signal: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        extra = ["--steps", "3"] if signal in ("duo", "head-gates") else []
        main(["probe", *options, "--signal", signal, "--window", "8", *extra])
        name, workspace = f"mine-{signal}", tmp_path / "w"
        assert f"{signal} mean" in capsys.readouterr().out
        table = HeadScores.read(workspace / "probes" / name)
        assert (table.signal, table.window, table.num_layers) == (signal, 8, 4)
        main(["propose", "--probe", name, "--budget", "3", "--workspace", str(workspace)])
        layout = Layout.read(workspace / "layouts" / name / "densest.yaml")
        chosen = set(np.flatnonzero(layout.global_mask.ravel()))
        assert chosen == set(np.argsort(-table.values.ravel(), kind="stable")[:3])
        assert layout.provenance["signal"] == signal
        assert layout.provenance["source"] == str(tmp_path / "mine")
        main(["score", f"{workspace}/layouts/{name}/densest.yaml", *options, "--probe", name])
        assert (workspace / "reports" / name / "zero-shot.csv").is_file()

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (
                ["--signal", "entropy"],
                "unknown signal 'entropy'; expected one of density, head-gates, opening",
            ),
            (["--signal", "duo", "--tau", "0.5"], "--tau does not apply to --signal duo; it applies to density"),
            (["--signal", "density", "--granularity", "layer"], "--granularity does not apply to --signal density"),
            (["--signal", "attention-mass", "--steps", "3"], "it applies to density, head-gates, duo"),
            (["--signal", "attention-mass", "--window", "64"], "no keys beyond a window of 64 keys"),
            (["--signal", "retrieval", "--window", "60"], "cannot hold a needle"),
            (["--signal", "duo", "--window", "8", "--steps", "0"], "greater than or equal to 1"),
            (["--signal", "density"], "too short to hold out a part"),
        ],
    )
    def test_bad_input(
        self, extra: list[str], message: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert message in fails(capsys, "probe", *options, *extra)
        assert not list((tmp_path / "w").rglob("*.csv"))

    def test_a_model_needs_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("probe", "--signal", "duo", "--workspace", tmp_path / "w", "--model")
        assert "--model needs --data" in fails(capsys, *arguments, "somewhere")
        (tmp_path / "empty.txt").write_text(" \n")
        assert "empty" in fails(capsys, *arguments, "embedded:dense", "--data", tmp_path / "empty.txt")
