"""Test the measurement of attention sinks, and that signals and layouts see the sink tokens that it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
import typer
from helpers import make_table, tiny_model
from marks import slow
from spkv_kernels import attention
from transformers import Qwen2ForCausalLM

import spkv_nas
from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks, build_blocks
from spkv_nas.data.tokenizer import Boundaries
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.attention import LayerState, attention_layers
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing.frozen import Mixture
from spkv_nas.probing.head_gates import head_gates
from spkv_nas.probing.heads import attention_weights
from spkv_nas.probing.measure import measure_signal
from spkv_nas.probing.signals import SIGNALS, parse_sinks
from spkv_nas.probing.sinks import MassiveActivation, SinkReport, choose_sinks, measure_sinks
from spkv_nas.stages.probe import show

WINDOW, LENGTH, BOS = 6, 48, 1
SHALLOW = {"num_hidden_layers": 2}  # where signals take a pass per head
FEW: dict[str, dict[str, Any]] = {
    "head-gates": {"steps": 3, "budget": 2},
    "duo": {"steps": 3},
    "regression": {"num_layouts": 20, "budget": 2},
}


@pytest.fixture(autouse=True)
def brief_checks() -> None:
    """Check on as many tokens as commands do."""


@pytest.fixture
def blocks() -> TokenBlocks:
    """Six blocks of random tokens behind BOS, each a document."""
    tokens = np.random.default_rng(0).integers(3, 97, size=(6, LENGTH)).astype(np.int32)
    tokens[:, 0] = BOS
    owner = np.repeat(np.arange(6, dtype=np.int32)[:, None], LENGTH, 1)
    return TokenBlocks(
        tokens,
        owner,
        tuple(DocumentInfo(str(i), "a", str(i)) for i in range(6)),
        boundaries=Boundaries((BOS,)),
    )


def planted_tiny(bias: float = planted.STRONG, **options: Any) -> Qwen2ForCausalLM:
    model: Any = tiny_model("qwen2", head_dim=8, **options)
    planted.plant(model, BOS, bias)
    return model  # type: ignore[no-any-return]


def report(*by_position: Sequence[float], average: float = 0.0) -> SinkReport:
    """Make a report of one layer, one tuple of masses per head."""
    mass = np.array([by_position], dtype=np.float64)
    return SinkReport(
        mass,
        mass.shape[1],
        average,
        (MassiveActivation(layer=0, ratio=5.0, channel=1, position=0),),
    )


class TestMeasurement:
    def test_is_the_mean_attention_beyond_the_window(self, blocks: TokenBlocks) -> None:
        model = planted_tiny()
        measured = measure_sinks(model, blocks, WINDOW, tokens=4 * LENGTH)
        chosen = torch.from_numpy(blocks.spread(4).tokens.astype(np.int64))
        model.set_attn_implementation("eager")
        with torch.no_grad():
            # [L, N, Hq, T, T]
            weights = torch.stack(model(chosen, output_attentions=True).attentions)
        expected = weights[:, :, :, WINDOW + 8 :, :8].mean((1, 3)).numpy()
        assert measured.mass == pytest.approx(expected, abs=1e-5)
        grouped = expected[..., :4].sum(-1).reshape(4, 2, 2).mean(-1)
        assert measured.kv_mass == pytest.approx(grouped, abs=1e-5)
        assert measured.first_mass > 0.3

    def test_finds_planted_sinks_and_the_massive_activation(self, blocks: TokenBlocks) -> None:
        measured = measure_sinks(planted_tiny(), blocks, WINDOW)
        assert measured.number == 1
        largest = measured.largest
        assert largest is not None
        assert (largest.channel, largest.position) == (0, 0)
        assert largest.ratio > 50
        assert measured.num_strong > 4

    def test_restores_the_model(self, blocks: TokenBlocks) -> None:
        model = planted_tiny()
        measure_sinks(model, blocks)
        assert not attention_layers(model)
        assert not any(module._forward_hooks for module in model.modules())

    @pytest.mark.parametrize(
        ("window", "num_positions"), [(LENGTH - 9, 8), (LENGTH - 2, 2), (LENGTH, 1)]
    )
    def test_leaves_out_keys_in_the_window(
        self, window: int, num_positions: int, blocks: TokenBlocks
    ) -> None:
        """With few queries beyond a wide window, later keys of the first eight are in it."""
        measured = measure_sinks(planted_tiny(), blocks, window)
        assert measured.mass.shape[-1] == num_positions
        assert measured.number == 1

    def test_leaves_out_layers_with_a_native_window(self, blocks: TokenBlocks) -> None:
        model = tiny_model("gemma3_text")
        num_full = model.config.layer_types.count("full_attention")
        assert len(measure_sinks(model, blocks, 2).mass) == num_full < 4

    def test_of_learned_sinks_counts_the_rest(self, blocks: TokenBlocks) -> None:
        model = tiny_model("gpt_oss")
        masses = []
        for logit in (-30.0, 30.0):
            for module in model.modules():
                if hasattr(module, "sinks"):
                    torch.nn.init.constant_(module.sinks, logit)
            masses.append(measure_sinks(model, blocks, 2).mass.mean())
        assert masses[0] > 0.01 > 1e-6 > masses[1]

    @pytest.mark.parametrize("softcap", [None, 1.5])
    def test_with_learned_sinks_weights_are_those_of_the_operator(
        self, softcap: float | None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
        sink_logits = torch.randn(4, generator=generator)
        options: Any = {"window": 20, "sink_logits": sink_logits, "softcap": softcap}
        parts = [w for _, w in attention_weights(q, k, 0.9, **options)]
        weights = torch.cat(
            [torch.nn.functional.pad(part, (0, 20 - part.shape[-1])) for part in parts], -2
        )
        out = (weights @ v[:, :, None]).flatten(1, 2)
        assert torch.allclose(out, attention(q, k, v, scale=0.9, **options), atol=1e-5)

    def test_refuses_a_broken_model(self, blocks: TokenBlocks) -> None:
        model = planted_tiny()
        torch.nn.init.constant_(model.model.layers[1].self_attn.q_proj.weight, torch.nan)
        with pytest.raises(UserError, match="attention is not finite"):
            measure_sinks(model, blocks, WINDOW)


class TestNumber:
    @pytest.mark.parametrize(
        ("number", "by_position"),
        [
            (1, (0.6, 0.02, 0.02, 0.01)),
            (2, (0.4, 0.2, 0.01, 0.01)),
            (4, (0.3, 0.1, 0.1, 0.0)),
            (4, (0.1, 0.1, 0.1, 0.1)),
            (1, (0.0021, 0.0, 0.0, 0.0)),
            (0, (0.0019, 0.0, 0.0, 0.0)),
            (0, (0.0, 0.0, 0.0, 0.0)),
        ],
    )
    def test_holds_nine_tenths_of_the_first_four(
        self, number: int, by_position: tuple[float, ...]
    ) -> None:
        assert report(by_position).number == number

    def test_ignores_what_any_token_gets(self) -> None:
        assert report((0.02, 0.02, 0.02, 0.02), average=0.02).number == 0
        assert report((0.3, 0.02, 0.02, 0.02), average=0.02).number == 1

    def test_one_strong_head_is_enough(self) -> None:
        weak = [(0.0, 0.0, 0.0, 0.0)] * 300
        assert report((0.31, 0.0, 0.0, 0.0), *weak).number == 1
        assert report((0.29, 0.0, 0.0, 0.0), *weak).number == 0

    def test_is_1_on_the_embedded_model(self) -> None:
        model, tokenizer = spkv_nas.load("embedded:dense")
        texts = [Path(module.__file__ or "").read_text() for module in (np.linalg, pytest, typer)]
        measured = measure_sinks(model, build_blocks(texts, tokenizer, 128), tokens=256)
        assert measured.number == 1
        assert measured.first_mass > 0.05
        assert measured.largest is not None
        assert measured.largest.position == 0


class TestChoice:
    def test_keeps_that_of_a_layout_or_of_gates(self, blocks: TokenBlocks) -> None:
        model = planted_tiny()
        assert choose_sinks(model, blocks, WINDOW)[0] == 1
        apply_layout(model, Layout(("GL",) * 4, WINDOW, sinks=3))
        assert choose_sinks(model, blocks) == (3, {})
        gated = planted_tiny()
        attach_gates(gated, GateConfig(window=WINDOW, sinks=2))
        assert choose_sinks(gated, blocks) == (2, {})

    @pytest.mark.parametrize("text", ["some", "-1", "1.5", "", str(10**12)])
    def test_refuses_what_is_no_number(self, text: str) -> None:
        with pytest.raises(UserError, match=f"--sinks must be auto or a number .* found '{text}'"):
            parse_sinks(text)

    def test_reads_numbers_and_auto(self) -> None:
        assert [parse_sinks(text) for text in (None, "auto", "0", "4")] == [None, None, 0, 4]


@pytest.mark.parametrize("signal", ["add-one-head", slow("duo"), "head-gates"])
def test_a_window_of_all_layers_that_hides_nothing_changes_nothing(
    signal: str, blocks: TokenBlocks
) -> None:
    """Models whose layers all have a native window got no sink tokens."""
    sliding = {
        "use_sliding_window": True,
        "max_window_layers": 0,
        "sliding_window": blocks.block_size,
    }
    models = (planted_tiny(**SHALLOW), planted_tiny(**SHALLOW, **sliding))
    tables = [
        measure_signal(signal, model, blocks, window=WINDOW, **FEW.get(signal, {}))
        for model in models
    ]
    assert [table.sinks for table in tables] == [1, 1]
    assert tables[0].record.sink_mass == tables[1].record.sink_mass
    assert np.allclose(tables[0].values, tables[1].values, atol=1e-6)


@pytest.mark.parametrize(("native", "number"), [(WINDOW + 8, 0), (WINDOW + 12, 1)])
def test_only_queries_that_see_the_first_tokens_count(
    native: int, number: int, blocks: TokenBlocks
) -> None:
    """A native window hides them from later queries, and from all that count if it is short."""
    model = planted_tiny(use_sliding_window=True, max_window_layers=0, sliding_window=native)
    measured = measure_sinks(model, blocks, WINDOW)
    assert measured.number == number
    assert (measured.first_mass > 0.3) == (measured.num_strong > 4) == bool(number)


class TestSignals:
    @pytest.mark.filterwarnings("ignore:the model predicts only")
    @pytest.mark.parametrize(
        "signal",
        [
            name if name in ("add-one-head", "duo", "head-gates", "window-costs") else slow(name)
            for name in SIGNALS.names
            if name != "density"
        ],
    )
    def test_measure_with_the_sinks_of_the_model(self, signal: str, blocks: TokenBlocks) -> None:
        model, options = planted_tiny(**SHALLOW), FEW.get(signal, {})
        tables = [
            measure_signal(signal, model, blocks, window=WINDOW, sinks=sinks, **options)
            for sinks in (None, 1, 2, 0)
        ]
        assert [table.sinks for table in tables] == [1, 1, 2, 0]
        assert np.array_equal(tables[0].values, tables[1].values)
        assert (
            "sink_mass" in tables[0].record.entries(),
            "sink_mass" in tables[1].record.entries(),
        ) == (
            True,
            False,
        )
        if signal != "retrieval":  # no window
            assert not np.array_equal(tables[0].values, tables[3].values)

    def test_record_what_was_measured_without_sinks(self, blocks: TokenBlocks) -> None:
        table = measure_signal("add-one-head", tiny_model("qwen2"), blocks, window=WINDOW)
        assert (table.sinks, "sinks" in table.record.entries()) == (0, False)
        assert 0.0 < table.record.sink_mass < 0.2
        assert table.record.massive_activation.ratio > 1.0

    def test_gains_are_those_of_layouts_with_sinks(self, blocks: TokenBlocks) -> None:
        model = planted_tiny(bias=0.0)
        table = measure_signal("add-one-head", model, blocks, window=WINDOW, sinks=2)
        local = Layout(("LL",) * 4, WINDOW, sinks=2)
        one = replace(local, heads=("LL", "LG", "LL", "LL"))
        before, after = (score.mean for score in zero_shot(model, [local, one], blocks))
        assert table.values[1, 1] == pytest.approx(before - after, abs=1e-7)
        without = measure_signal("add-one-head", model, blocks, window=WINDOW, sinks=0)
        assert without.values[1, 1] != pytest.approx(before - after, abs=1e-6)

    def test_mixture_sees_sinks_in_local_attention(self) -> None:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
        learned = torch.randn(4, generator=generator)
        mixture = Mixture.of_global(
            LayerState(2, None), torch.tensor([0.0, 1.0]), window=3, sinks=2
        )
        local, whole = (
            attention(q, k, v, window=w, sinks=2, scale=0.3, sink_logits=learned) for w in (3, 20)
        )
        expected = torch.cat([local[:, :2], whole[:, 2:]], 1)
        assert torch.allclose(mixture(q, k, v, 0.3, sink_logits=learned), expected, atol=1e-6)

    def test_head_gates_in_python_give_layouts_the_sinks_of_the_model(
        self, blocks: TokenBlocks
    ) -> None:
        """They were 0 by default, and a number that was set was not recorded."""
        model, options = planted_tiny(), {"window": WINDOW, "steps": 2, "budget": 2}
        table = spkv_nas.head_gates(model, blocks, **options)
        assert spkv_nas.propose(table, 2)["densest"].sinks == table.sinks == 1
        assert table.record.sink_mass > 0.3
        assert np.array_equal(
            table.values, measure_signal("head-gates", model, blocks, **options).values
        )
        assert [
            spkv_nas.head_gates(model, blocks, sinks=sinks, **options).sinks for sinks in (0, 2)
        ] == [0, 2]

    def test_head_gates_learn_on_models_with_learned_sinks(self, blocks: TokenBlocks) -> None:
        table = head_gates(tiny_model("gpt_oss"), blocks, 2, budget=2, steps=2)
        assert table.values.sum() == pytest.approx(2.0, abs=1e-6)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the planted model before training, and some text."""
    folder = tmp_path_factory.mktemp("planted")
    model, tokenizer = planted.planted(planted.STRONG)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("".join(planted.texts()[1])[:60_000])
    return folder


@pytest.fixture(scope="module", params=[planted.WEAK, planted.STRONG], ids=["weak", "strong"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a planted model; minutes."""
    return planted.write(tmp_path_factory.mktemp("planted"), request.param)


class TestCommand:
    @pytest.mark.slow
    def test_layouts_get_the_measured_sinks(
        self, untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        workspace = ["-w", str(tmp_path)]
        subject = [
            "--model",
            str(untrained / "model"),
            "--data",
            str(untrained / "text.txt"),
            "--context",
            "128",
        ]
        few = ["--signal", "attention-mass", "--max-tokens", "1024", "--name", "mass"]
        main(["probe", *subject, *few, *workspace])
        output = " ".join("".join(capsys.readouterr()).split())
        assert "% of attention is on the first token; " in output
        assert "of 63 heads give the first four more than 30 %: layouts get 1 sink token" in output
        table = HeadScores.read(tmp_path / "probes" / "mass")
        assert table.sinks == 1
        assert table.record.sink_mass > 0.5
        assert table.record.massive_activation.position == 0
        # The table's sinks, and others
        for options, sinks in (([], 1), (["--sinks", "4"], 4), (["--sinks", "0"], 0)):
            main(["propose", "--budget", "18", *options, *workspace])
            output = " ".join("".join(capsys.readouterr()).split())
            assert ("local heads also see the first" in output) == bool(sinks)
            assert Layout.read(tmp_path / "layouts" / "mass" / "densest.yaml").sinks == sinks


class TestMessage:
    @pytest.mark.parametrize(
        ("by_position", "message"),
        [
            (
                (0.5, 0.0, 0.0, 0.0),
                "50 % of attention is on the first token; 2 of 2 heads give the first four more than",
            ),
            (
                (0.1, 0.1, 0.1, 0.1),
                "40 % of attention is on the first 4 tokens; 2 of 2 heads give the first four more",
            ),
            (
                (0.05, 0.04, 0.0, 0.0),
                "9.0 % of attention is on the first 2 tokens; 0 of 2 heads give the first four",
            ),
            (
                (0.001, 0.0, 0.0, 0.0),
                "0.1 % of attention is on the first token; 0 of 2 heads give the first four",
            ),
        ],
    )
    def test_says_what_was_measured(
        self, by_position: tuple[float, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It gave the attention on the first token also where layouts get more."""
        measured = report(by_position, by_position)
        for num_layers, among in (
            (1, "2 heads give"),
            (3, "2 heads without a native sliding window give"),
        ):
            table = make_table(np.full((num_layers, 2), 0.5))
            show(
                replace(
                    table,
                    record=ProbeRecord.of({"sinks": measured.number, **measured.as_mapping()}),
                )
            )
            printed = " ".join(capsys.readouterr().out.split())
            assert message.replace("2 heads give", among) in printed
            assert f"layouts get {measured.number or 'no'} sink token" in printed
            assert (
                "largest activation: 5 times the layer's median (layer 0, channel 1, token 0)"
                in printed
            )

    def test_of_short_blocks_names_the_sink_tokens(self, blocks: TokenBlocks) -> None:
        with pytest.raises(UserError, match="window of 47 keys and 1 sink token\n"):
            measure_signal("add-one-head", planted_tiny(), blocks, window=LENGTH - 1)


@pytest.mark.slow
class TestTrained:
    def test_default_path_costs_little(
        self, trained: Path, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        """Run without the sinks that they were chosen with, the heads cost 2.2 % (weak) and 6.3 % (strong) of NLL.

        The weak model's 1.3 % only guards against regressions: 1.24 % was measured, which misses the goal of 1.1 %.
        """
        workspace = ["-w", str(tmp_path)]
        text = [
            "--model",
            str(trained / "model"),
            "--data",
            str(trained / "train"),
            "--documents",
            "joined",
        ]
        sizes = ["--window", "32", "--budget", "18", "--max-tokens", "61440"]
        main(["probe", *text, *sizes, "--name", "chosen", *workspace])
        assert 1 <= HeadScores.read(tmp_path / "probes" / "chosen").sinks <= 4
        main(["propose", "--budget", "18", *workspace])
        layout = Layout.read(tmp_path / "layouts" / "chosen" / "densest.yaml")
        model, tokenizer = spkv_nas.load(trained / "model")
        texts = [file.read_text() for file in sorted((trained / "heldout").iterdir())]
        heldout = build_blocks(texts, tokenizer, planted.BLOCK).spread(80)
        with_sinks, without, dense = (
            score.mean
            for score in zero_shot(model, [layout, replace(layout, sinks=0), None], heldout)
        )
        is_strong = "strong" in request.node.name
        assert with_sinks / dense - 1 < (0.005 if is_strong else 0.013)
        assert without - dense > 1.5 * (with_sinks - dense)
