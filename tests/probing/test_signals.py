"""Test the other signals against a small direct computation from full attention matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import fails, gated, tiny_model
from marks import slow, slow_after
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.contrib.signals.measure.attention_mass import attention_mass
from spkv_nas.contrib.signals.measure.retrieval import retrieval
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.model.attention import attention_layers
from spkv_nas.model.checkpoint import save
from spkv_nas.model.windows import apply_layout, full_attention
from spkv_nas.probing.duo import AlphaMixture, duo, sums_of_squares
from spkv_nas.probing.measure import measure_signal
from spkv_nas.probing.signals import SIGNALS

WINDOW, LENGTH = 6, 40
OTHER_SIGNALS = SIGNALS.names[1:]
EACH_OTHER = [name if SIGNALS[name] in SIGNALS.built_in else slow(name) for name in OTHER_SIGNALS]


@pytest.fixture
def blocks() -> TokenBlocks:
    """Token blocks: 6 of 40 tokens; 10 documents of 24 tokens in two domains, so that documents cross blocks."""
    tokens = np.random.default_rng(0).integers(3, 290, size=(6, LENGTH)).astype(np.int32)
    owner = np.repeat(np.arange(10, dtype=np.int32), 24).reshape(6, LENGTH)
    return TokenBlocks(
        tokens, owner, tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(10))
    )


def last_hidden(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state


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
        options: Any = {"sinks": 0, "steps": 40, "learning_rate": 0.1, "regularisation": 0.05}
        table = duo(model, blocks, WINDOW, progress=lambda *step: seen.append(step), **options)
        assert seen == [(step, 40) for step in range(1, 41)]
        assert table.density[:, 1].max() == 0.0
        assert table.density[:, 0].min() > 0.3
        assert table.record.entries()["distillation_loss"] > 0.0
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        brief = {**options, "steps": 2}
        first, second = (duo(model, blocks, WINDOW, **brief).density for _ in range(2))
        assert np.array_equal(first, second)


class TestMeasure:
    @pytest.mark.filterwarnings("ignore:the model predicts:UserWarning")
    @pytest.mark.parametrize("signal", EACH_OTHER)
    def test_takes_the_window_of_the_gates(
        self, signal: str, blocks: TokenBlocks, tmp_path: Path
    ) -> None:
        """The table is read back as it was written, with values in [0, 1]."""
        metadata = {"model": "somewhere"}
        options: dict[str, Any] = {"steps": 2} if signal in ("duo", "head-gates") else {}
        if signal == "retrieval":
            blocks = TokenBlocks(
                *(x.reshape(3, 80) for x in (blocks.tokens, blocks.document)), blocks.documents
            )
        table = measure_signal(signal, gated(), blocks, name="mine", metadata=metadata, **options)
        assert table.window == 6
        assert 0.0 <= table.density.min() < table.density.max() <= 1.0
        table.write(tmp_path / "mine")
        read = HeadScores.read(tmp_path / "mine")
        assert read.density == pytest.approx(table.density, abs=1e-5)
        assert (read.name, read.signal, read.record.source) == (
            "mine",
            signal,
            "somewhere",
        )
        # --kv-bytes needs them
        assert (read.record.head_dim, read.record.dtype) == (
            8,
            "float32",
        )
        assert read.diagnosis() == []

    @pytest.mark.filterwarnings("ignore:the model predicts:UserWarning")
    def test_reported_cost(self, blocks: TokenBlocks) -> None:
        """Duo's 5 steps of 2 of 6 blocks are 10 / 6 of the text, each token forward twice and backward once."""
        model = tiny_model(vocab_size=300)
        tables = [
            attention_mass(model, blocks, WINDOW),
            retrieval(model, blocks, WINDOW, needle_length=8),
        ]
        assert [(t.record.entries()["passes"], t.record.entries()["tokens"]) for t in tables] == [
            (1.0, 240),
            (1.0, 240),
        ]
        assert duo(model, blocks, WINDOW, steps=5).record.entries()["passes"] == 5.0

    def test_invalid_inputs(self, blocks: TokenBlocks) -> None:
        model = tiny_model(vocab_size=300)
        for signal in OTHER_SIGNALS:
            with pytest.raises(UserError, match="no text"):
                measure_signal(signal, model, blocks.take(0))
            with pytest.raises(UserError, match="at least 1"):
                measure_signal(signal, model, blocks, window=0)
            with pytest.raises(
                UserError, match=r"window of 128 keys.*\n.*smaller --window, or a larger --context"
            ):
                measure_signal(signal, model, blocks, window=128)
        with pytest.raises(UserError, match="steps must be at least 1"):
            measure_signal("duo", model, blocks, window=6, steps=0)
        with pytest.raises(
            UserError,
            match="--steps does not apply to --signal retrieval; it applies to density, head-gates",
        ):
            SIGNALS.check_options(SIGNALS["retrieval"], {"steps": 3})
        assert not attention_layers(model)


class TestCommand:
    @pytest.fixture
    def options(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> list[str]:
        save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "mine")
        (tmp_path / "text.txt").write_text(
            "".join(f"the fox {(7 * i) % 31} jumps over {i}. " for i in range(60))
        )
        options = ["--model", tmp_path / "mine", "--data", tmp_path / "text.txt", "--context", 64]
        return [*map(str, options), "--workspace", str(tmp_path / "w")]

    @pytest.mark.filterwarnings("ignore:the model predicts:UserWarning")
    @pytest.mark.parametrize("signal", slow_after(2, EACH_OTHER))
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
                "unknown signal 'entropy'; expected one of density, head-gates, add-one-head",
            ),
            (
                ["--signal", "duo", "--tau", "0.5"],
                "--tau does not apply to --signal duo; it applies to density",
            ),
            (
                ["--signal", "density", "--granularity", "layer"],
                "--granularity does not apply to --signal density",
            ),
            (
                ["--signal", "attention-mass", "--steps", "3"],
                "it applies to density, head-gates, duo",
            ),
            (
                ["--signal", "attention-mass", "--window", "64"],
                "no keys beyond a window of 64 keys",
            ),
            (["--signal", "retrieval", "--window", "60"], "cannot hold a needle"),
            (["--signal", "duo", "--window", "8", "--steps", "0"], "greater than or equal to 1"),
            (["--signal", "density"], "too short to hold out a part"),
        ],
    )
    def test_bad_input(
        self,
        extra: list[str],
        message: str,
        options: list[str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert message in fails(capsys, "probe", *options, *extra)
        assert not list((tmp_path / "w").rglob("*.csv"))

    def test_a_model_needs_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("probe", "--signal", "duo", "--workspace", tmp_path / "w", "--model")
        assert "--model needs --data" in fails(capsys, *arguments, "somewhere")
        (tmp_path / "empty.txt").write_text(" \n")
        assert "empty" in fails(
            capsys, *arguments, "embedded:dense", "--data", tmp_path / "empty.txt"
        )
