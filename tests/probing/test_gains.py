"""Test gains of heads and layers: each is the difference of two plain scores, and layouts follow them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import fails, gated, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.kinds import NATS
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.statistics import jackknife_ratio
from spkv_nas.cli import main
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks, build_blocks
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.model.attach import detach
from spkv_nas.model.attention import attention_layers, layer_states
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.windows import full_attention
from spkv_nas.probing.gains import gains
from spkv_nas.probing.measure import measure_signal

WINDOW = 6
add_one, leave_one_out = (
    partial(gains, name, opens=opens)
    for name, opens in (("add-one-head", True), ("leave-one-out", False))
)
Signal = Callable[..., HeadScores]


@pytest.fixture
def blocks() -> TokenBlocks:
    """Token blocks: 5 of 40 tokens; 10 documents of 20 tokens in two domains."""
    tokens = np.random.default_rng(0).integers(3, 290, size=(5, 40)).astype(np.int32)
    owner = np.repeat(np.arange(10, dtype=np.int32), 20).reshape(5, 40)
    return TokenBlocks(
        tokens, owner, tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(10))
    )


def loud(family: str = "llama") -> PreTrainedModel:
    """Make a model on which attention outside the window has a large effect."""
    model = tiny_model(family, vocab_size=300)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 20.0
    return model


def plain(model: PreTrainedModel, windows: np.ndarray, blocks: TokenBlocks) -> DocumentNLL:
    """Return NLL with a window per KV head [L, Hkv], in whole passes."""
    with full_attention(model) as states:
        for state, row in zip(states, windows.tolist(), strict=True):
            state.windows = tuple(row)
        return document_nll(model, blocks, batch_size=2)


def ends(model: PreTrainedModel, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows [L, Hkv] of all-local and of full attention."""
    with full_attention(model) as states:
        whole = np.array([[state.checkpoint_window] * state.num_kv_heads for state in states])
    return np.minimum(whole, window), whole


def by_hand(
    model: PreTrainedModel, blocks: TokenBlocks, places: Sequence[Any], *, opens: bool
) -> list[float]:
    """Return the gain of the heads at each of ``places`` in [L, Hkv]."""
    local, whole = ends(model, WINDOW)
    before, after = (local, whole) if opens else (whole, local)
    base, gains = plain(model, before, blocks).mean, []
    for index in places:
        windows = before.copy()
        windows[index] = after[index]
        gains.append((base - plain(model, windows, blocks).mean) * (1 if opens else -1))
    return gains


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("signal", [add_one, leave_one_out])
class TestGains:
    def test_gains_are_differences_of_plain_scores(
        self, signal: Signal, family: str, blocks: TokenBlocks
    ) -> None:
        """A Gemma's local layers, with windows of 4 keys, can be neither opened nor closed beyond 6."""
        model = loud(family)
        table = signal(model, blocks, WINDOW, batch_size=2)
        places = [(layer, head) for layer in range(4) for head in range(2)]
        expected = by_hand(model, blocks, places, opens=signal is add_one)
        assert table.values.ravel() == pytest.approx(expected, abs=1e-6)
        assert np.abs(table.values).max() > 1e-4
        assert not attention_layers(model)
        if family == "gemma3_text":
            local = ends(model, WINDOW)[1] < WINDOW
            assert 0 < local.sum() < 8
            assert not table.values[local].any()
            assert table.values[~local].all()

    def test_layer_gains_are_measured(
        self, signal: Signal, family: str, blocks: TokenBlocks
    ) -> None:
        model = loud(family)
        table = signal(model, blocks, WINDOW, granularity="layer", batch_size=2)
        expected = by_hand(model, blocks, [0, 1, 2, 3], opens=signal is add_one)
        assert table.values.sum(1) == pytest.approx(expected, abs=1e-6)
        assert np.array_equal(table.values[:, 0], table.values[:, 1])
        heads = signal(model, blocks, WINDOW, batch_size=2)
        assert heads.values.sum(1) != pytest.approx(expected, abs=1e-6)
        assert (table.record.granularity, heads.record.granularity) == (
            "layer",
            "head",
        )


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("signal", [add_one, leave_one_out])
def test_a_limit_measures_the_layers_with_the_largest_gains(
    signal: Signal, family: str, blocks: TokenBlocks
) -> None:
    model = loud(family)
    seen: list[tuple[int, int]] = []
    table = signal(
        model, blocks, WINDOW, max_heads=3, batch_size=2, progress=lambda *step: seen.append(step)
    )
    layers = signal(model, blocks, WINDOW, granularity="layer")
    heads = signal(model, blocks, WINDOW)
    most = int(layers.values.sum(1).argmax())
    assert table.values[most] == pytest.approx(heads.values[most], abs=1e-6)
    others = np.arange(4) != most
    assert table.values[others] == pytest.approx(layers.values[others], abs=1e-6)
    assert table.values[most] != pytest.approx(layers.values[most], abs=1e-6)
    assert table.record.granularity == "mixed"
    assert (
        layers.record.entries()["passes"]
        < table.record.entries()["passes"]
        <= layers.record.entries()["passes"] + 2
    )
    assert seen[-1][0] == seen[-1][1]
    whole = signal(model, blocks, WINDOW, max_heads=9)
    assert whole.values == pytest.approx(heads.values, abs=1e-6)
    assert (whole.record.granularity, whole.record.entries()["passes"]) == (
        "head",
        heads.record.entries()["passes"],
    )


def test_errors_are_paired_by_document(blocks: TokenBlocks) -> None:
    model = loud()
    table = add_one(model, blocks, WINDOW)
    local, whole = ends(model, WINDOW)
    base = plain(model, local, blocks)
    local[2, 1] = whole[2, 1]
    change = paired_difference(plain(model, local, blocks), base)
    row = table.rows.query("layer == 2 and kv_head == 1").set_index("domain")
    assert table.values[2, 1] == pytest.approx(-change.percent / 100 * base.mean, abs=1e-7)
    for parity, domain in enumerate("ab"):
        mine = np.arange(10) % 2 == parity
        part = DocumentNLL(np.where(mine, base.total, 0), np.where(mine, base.num_tokens, 0))
        opened = plain(model, local, blocks)
        _, error = jackknife_ratio(np.where(mine, opened.total, 0) - part.total, part.num_tokens)
        assert row.loc[domain, "standard_error"] == pytest.approx(error, rel=1e-6)
        assert row.loc[domain, ["num_tokens", "num_documents"]].tolist() == [
            part.num_tokens.sum(),
            5,
        ]


def test_passes_share_their_first_layers(blocks: TokenBlocks) -> None:
    """The local model needs one pass, and each of the 2 heads of layer l of 4 needs (4 - l) / 4."""
    model = tiny_model(vocab_size=300)
    runs = 0

    def count(_module: object, _args: object, out: torch.Tensor) -> None:
        nonlocal runs
        # And not a few tokens, to see what the model can do
        runs += out.shape[1] == blocks.block_size

    hooks = [layer.mlp.register_forward_hook(count) for layer in model.model.layers]
    seen: list[tuple[int, int]] = []
    table = add_one(model, blocks, WINDOW, batch_size=5, progress=lambda *step: seen.append(step))
    for hook in hooks:
        hook.remove()
    assert runs / 4 == table.record.entries()["passes"] == 1 + 2 * (4 + 3 + 2 + 1) / 4
    assert table.record.entries()["tokens"] == blocks.tokens.size
    assert seen == [(5 * number, 45) for number in range(1, 10)]
    assert leave_one_out(model, blocks, WINDOW).record.entries()["passes"] == 6.0
    assert add_one(model, blocks, WINDOW, granularity="layer").record.entries()["passes"] == 3.5


def test_gates_and_windows_do_not_count(blocks: TokenBlocks) -> None:
    model = gated()
    states = copy.deepcopy(layer_states(model))
    result = add_one(model, blocks, WINDOW).values
    assert layer_states(model) == states
    detach(model)
    assert add_one(model, blocks, WINDOW).values == pytest.approx(result, abs=1e-6)


def test_refused_inputs(blocks: TokenBlocks) -> None:
    model = tiny_model(vocab_size=300)
    with pytest.raises(UserError, match="no keys beyond a window of 40 keys"):
        measure_signal("add-one-head", model, blocks, window=40)
    with pytest.raises(UserError, match="--granularity must be head or layer; found 'block'"):
        leave_one_out(model, blocks, WINDOW, granularity="block")
    with pytest.raises(
        UserError, match="--max-heads 1 is too small: give at least 2, the heads of a layer"
    ):
        add_one(model, blocks, WINDOW, max_heads=1)
    with pytest.raises(UserError, match="--granularity layer measures none"):
        add_one(model, blocks, WINDOW, granularity="layer", max_heads=2)
    with pytest.raises(
        UserError,
        match="--granularity does not apply to --signal duo; it applies to add-one-head, leave-one-out",
    ):
        measure_signal("duo", model, blocks, window=WINDOW, granularity="layer")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="not a finite number"):
        add_one(model, blocks, WINDOW)


def test_signed_values_order_heads_but_not_coverage(tmp_path: Path) -> None:
    """Gains of pure noise would not cancel if each domain were clipped at 0."""
    rows = [(0, 0, 0.03, "a"), (0, 0, 0.05, "b"), (0, 1, 0.02, "a"), (0, 1, -0.03, "b")]
    rows += [(1, 0, -0.2, "a"), (1, 0, 0.0, "b"), (1, 1, 1.5, "a"), (1, 1, 1.5, "b")]
    (tmp_path / "density.csv").write_text(
        "layer,kv_head,density,domain\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    )
    with pytest.raises(
        UserError, match=r"column 'density' must be a number in \[0, 1\]; found '-0.03'"
    ):
        HeadScores.read(tmp_path)
    table_file = tmp_path / "density.csv"
    table_file.write_text(table_file.read_text().replace("density", "score"))
    (tmp_path / "probe.yaml").write_text(f"signal: add-one-head\nkind: gain\nunit: {NATS}\n")
    table = HeadScores.read(tmp_path)
    assert table.values == pytest.approx(np.array([[0.04, -0.005], [-0.1, 1.5]]))
    assert table.density == pytest.approx(np.array([[0.04, 0.0], [0.0, 1.5]]))
    assert ">1.5<" in table._repr_html_()
    assert ">\N{MINUS SIGN}0.1<" in table._repr_html_()
    assert table.domain_density("b") == pytest.approx(np.array([[0.05, 0.0], [0.0, 1.5]]))


class TestCommand:
    @pytest.fixture
    def options(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> list[str]:
        save(loud(), tiny_tokenizer, tmp_path / "mine")
        (tmp_path / "text.txt").write_text(
            "".join(f"the fox {(7 * i) % 31} jumps over {i}. " for i in range(60))
        )
        options = ["--model", tmp_path / "mine", "--data", tmp_path / "text.txt", "--context", 64]
        return [
            *map(str, options),
            "--workspace",
            str(tmp_path / "w"),
            "--signal",
            "add-one-head",
            "--window",
            "8",
        ]

    def test_whole_layers_are_chosen_by_their_own_gains(
        self, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["probe", *options, "--granularity", "layer", "--max-tokens", "256"])
        name, workspace = "mine-add-one-head-layer", tmp_path / "w"
        table = HeadScores.read(workspace / "probes" / name)
        assert (table.record.entries()["passes"], table.record.entries()["tokens"]) == (3.5, 256)
        capsys.readouterr()
        arguments = ["--granularity", "layer", "--budget", "2", "--workspace", str(workspace)]
        main(["propose", "--probe", name, *arguments])
        layout = Layout.read(workspace / "layouts" / name / "constrained.yaml")
        assert layout.global_layers == (int(table.values.sum(1).argmax()),)
        capsys.readouterr()
        main(["propose", "--probe", name, *arguments[2:]])
        assert (
            "was measured for whole layers, so all heads of a layer have equal scores"
            in capsys.readouterr().err
        )

    def test_few_heads(
        self, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["probe", *options, "--max-heads", "2", "--max-tokens", "256"])
        capsys.readouterr()
        main(
            [
                "propose",
                "--probe",
                "mine-add-one-head",
                "--budget",
                "2",
                "--workspace",
                str(tmp_path / "w"),
            ]
        )
        assert (
            "measured single heads only in the layers with the largest gains"
            in capsys.readouterr().err
        )

    def test_by_default_the_text_is_a_few_blocks_of_all_of_it(
        self, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("spkv_nas.stages.probe.SCORING_TOKENS", 200)
        main(["probe", *options])
        table = HeadScores.read(tmp_path / "w" / "probes" / "mine-add-one-head")
        model, tokenizer = load(tmp_path / "mine")
        whole = build_blocks(
            [(tmp_path / "text.txt").read_text()], tokenizer, 64, documents="separate"
        )
        assert whole.num_blocks > 9
        chosen = whole.spread(3)
        # From several documents
        assert len({info.id for info in chosen.present}) == min(3, len(whole.present))
        assert np.array_equal(whole.spread(99).tokens, whole.tokens)
        assert table.record.entries()["tokens"] == 192
        assert table.values == pytest.approx(add_one(model, chosen, 8).values, abs=1e-6)

    def test_bad_input(
        self, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "--steps does not apply to --signal add-one-head" in fails(
            capsys, "probe", *options, "--steps", "3"
        )
        options[options.index("add-one-head")] = "retrieval"
        message = "--granularity does not apply to --signal retrieval; it applies to add-one-head, leave-one-out"
        assert message in fails(capsys, "probe", *options, "--granularity", "layer")
        assert not list((tmp_path / "w").rglob("*.csv"))
