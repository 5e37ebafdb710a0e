"""Test the costs of windows: the gradient of a mixture of kinds of attention, and their table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import equal_up_to_rounding, sharpen_attention, tiny_model
from marks import slow_after
from transformers import PreTrainedModel

import spkv_nas
from spkv_nas.artifacts.head_tables import WindowCosts
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.model.loss import mean_divergence
from spkv_nas.model.windows import full_attention, layout_windows
from spkv_nas.probing.frozen import Mixture
from spkv_nas.probing.head_gates import unobserved
from spkv_nas.probing.window_costs import num_draws, usual_blocks, window_costs

WINDOWS = (4, 16)


def text(num_blocks: int = 4, length: int = 64) -> TokenBlocks:
    """Return one block per document, half of them of each of two domains."""
    tokens = np.random.default_rng(0).integers(3, 60, size=(num_blocks, length)).astype(np.int32)
    owner = np.repeat(np.arange(num_blocks, dtype=np.int32), length).reshape(tokens.shape)
    return TokenBlocks(
        tokens, owner, tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(num_blocks))
    )


@pytest.mark.parametrize(
    ("block_size", "blocks"), [(512, 16), (2_048, 16), (4_096, 8), (8_192, 4), (32_768, 4)]
)
def test_longer_blocks_are_fewer_with_as_many_draws(block_size: int, blocks: int) -> None:
    assert usual_blocks(block_size) == blocks
    assert num_draws(blocks) * blocks >= 16


def divergence(
    model: PreTrainedModel, blocks: TokenBlocks, others: float, shares: tuple[float, float]
) -> float:
    """Return the divergence, in nats per token, where all heads have ``others`` of the widest window.

    One head, the second of layer 1, has ``shares`` of both windows besides; the rest is global attention.
    """
    tokens = torch.from_numpy(blocks.tokens.astype(np.int64))
    with full_attention(model) as states, torch.no_grad():
        for layer, state in enumerate(states):
            mixture = torch.tensor([0.0, others, 1.0 - others], dtype=torch.float64).repeat(
                1, state.num_kv_heads, 1
            )
            if layer == 1:
                mixture[0, 1] += torch.tensor([*shares, -sum(shares)], dtype=torch.float64)
            state.observer = Mixture(state, mixture, WINDOWS, sinks=1)
        return float(mean_divergence(model, tokens, lambda: unobserved(states)))


@pytest.mark.parametrize(("draws", "tolerance"), slow_after(1, [(100, 0.3), (600, 0.15)]))
def test_costs_are_the_second_order_of_the_divergence(
    draws: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second derivative of the head alone, and half of the mixed ones with all other heads at the widest window.

    Derivatives are finite differences in float64; the Fisher information is estimated from tokens that are drawn.
    """
    monkeypatch.setattr("spkv_nas.probing.window_costs.DRAWS", draws)
    model, blocks, step = sharpen_attention(tiny_model()).double(), text(1), 0.02
    table = window_costs(model, blocks, 4, windows=WINDOWS, sinks=1)
    assert table.window_costs is not None
    narrow, widest = table.window_costs.values[0, 1, 1]

    def loss(others: float, *shares: float) -> float:
        return divergence(model, blocks, others, (shares[0], shares[1]))

    slopes = [
        (loss(0.5, *e) - loss(0.5, *(-x for x in e))) / (2 * step)
        for e in ((step, 0.0), (0.0, step))
    ]
    assert widest == pytest.approx(slopes[1], rel=0.01)
    alone = loss(0.0, step, 0.0) / step**2
    with_widest = (loss(0.0, step, step) - loss(0.0, step, 0.0) - loss(0.0, 0.0, step)) / (
        2 * step**2
    )
    assert narrow == pytest.approx(alone + slopes[0] - with_widest, rel=tolerance)
    assert min(alone, slopes[1]) > 1e-6


def test_the_costs_of_the_widest_window_add_up_to_its_loss() -> None:
    model, blocks = sharpen_attention(tiny_model()).double(), text(4)
    table = window_costs(model, blocks, 16, windows=(16,), sinks=0)
    assert table.window_costs is not None
    local = spkv_nas.Layout(("LL",) * 4, window=16)
    losses = []
    tokens = torch.from_numpy(blocks.tokens.astype(np.int64))
    with full_attention(model) as states, torch.no_grad():
        for block in tokens:
            for state, windows in zip(states, layout_windows(model, local), strict=True):
                state.observer = Mixture(
                    state, torch.tensor([[1.0, 0.0]] * len(windows)).double(), (16,), sinks=0
                )
            losses.append(float(mean_divergence(model, block[None], lambda: unobserved(states))))
    assert float(table.values.sum()) == pytest.approx(np.mean(losses), rel=0.3)


def test_blocks_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of several blocks gives the mean of the costs of passes of one, by domain."""
    model, blocks = tiny_model(), text()
    whole = window_costs(model, blocks, 4, windows=WINDOWS).window_costs
    monkeypatch.setattr("spkv_nas.artifacts.defaults.LEARNING_TOKENS", 1)
    single = window_costs(model, blocks, 4, windows=WINDOWS)
    assert whole is not None
    assert single.window_costs is not None
    assert whole.domains == ("a", "b")
    np.testing.assert_allclose(whole.values, single.window_costs.values, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(
        single.values, single.domain_shares @ whole.values[..., 0].swapaxes(0, 1), atol=1e-8
    )


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_native_windows(family: str) -> None:
    model = tiny_model(family)
    table = spkv_nas.probe(model, text(), signal="window-costs", window=4, sinks=0)
    costs = table.window_costs
    assert costs is not None
    assert costs.windows == (4, 32)
    local = [layer for layer in range(table.num_layers) if layer not in table.layers]
    assert not costs.values[:, local].any()
    assert costs.values[:, table.layers].any()


def test_the_model_is_restored() -> None:
    model = tiny_model()
    before = [parameter.clone() for parameter in model.parameters()]
    tokens = torch.from_numpy(text().tokens.astype(np.int64))
    logits = model(tokens).logits
    window_costs(model, text(), 4, windows=WINDOWS)
    assert all(map(torch.equal, before, model.parameters()))
    assert equal_up_to_rounding(model(tokens).logits, logits)
    with pytest.raises(UserError, match="no keys beyond a window of 64"):
        window_costs(model, text(), 64)


class TestFile:
    def test_round_trip_and_damage(self, tmp_path: Path) -> None:
        table = window_costs(tiny_model(), text(), 4, windows=WINDOWS, name="x")
        table.write(tmp_path)
        reread = spkv_nas.HeadScores.read(tmp_path)
        assert reread.window_costs is not None
        assert table.window_costs is not None
        assert (reread.window_costs.windows, reread.window_costs.domains) == (WINDOWS, ("a", "b"))
        np.testing.assert_allclose(
            reread.window_costs.values, table.window_costs.values, rtol=1e-4, atol=1e-7
        )
        lines = (tmp_path / "windows.csv").read_text().splitlines()
        (tmp_path / "windows.csv").write_text("\n".join(lines[:-1]) + "\n")
        with (
            pytest.raises(UserError, match=r"windows.csv: expected every head"),
            pytest.warns(match="damaged"),
        ):
            spkv_nas.HeadScores.read(tmp_path)
        replace(table, window_costs=None).write(tmp_path)
        assert not (tmp_path / "windows.csv").exists()

    def test_other_windows_are_interpolated_in_their_logarithm(self) -> None:
        costs = WindowCosts((16, 64), np.array([[[[3.0, 1.0]]]]), ("all",))
        assert [costs.at(window).item() for window in (8, 16, 32, 64, 128)] == [
            3.0,
            3.0,
            2.0,
            1.0,
            1.0,
        ]
        assert costs.only((32, 16)).windows == (16, 32)
