"""Test the cost of attention: formulas agree with counting, and ``spkv-nas plan attention`` prints them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import fails, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.assets import PAPER_TABLE
from spkv_nas.cli import main
from spkv_nas.cost.formulas import (
    attention_flops,
    flops_per_token,
    kv_bytes_per_token,
    kv_cache_bytes,
    layout_density,
    training_flops,
)
from spkv_nas.cost.ladder import ladder
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import read_shape, save
from spkv_nas.model.generation_cache import SPKVCache
from spkv_nas.model.windows import apply_layout

with PAPER_TABLE.open(newline="") as _file:
    TABLE = {row["name"]: row for row in csv.DictReader(_file)}


SHAPE = Shape(num_parameters=1000, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)


class TestCost:
    def test_the_papers_equations(self) -> None:
        """C = 2 N + 2 L d_attn n, with a factor 0.2 on the second term at density 0.2 (caption of the FLOPs figure)."""
        assert flops_per_token(SHAPE, 4096) == 2 * 1000 + 2 * 3 * 32 * 4096
        assert flops_per_token(SHAPE, 4096, density=0.2) == pytest.approx(
            2 * 1000 + 0.2 * 2 * 3 * 32 * 4096
        )
        assert training_flops(SHAPE, 10, 4096) == 30 * flops_per_token(SHAPE, 4096)

    def test_linear_layers_and_attention_as_counted(self) -> None:
        """Torch's counter counts every score of the square; the formula counts the causal half."""
        model, length = tiny_model(num_hidden_layers=3, attn_implementation="eager"), 24
        level = replace(
            ladder()["level-0"],
            hidden_size=32,
            intermediate_size=48,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
        )
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, length, dtype=torch.int64))
        counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
        linear = sum(n for name, n in counts.items() if name.endswith("_proj"))
        norms = 7 * 32
        assert linear == 2 * (level.shape.num_parameters - norms) * length
        attention = sum(counts[f"LlamaForCausalLM.model.layers.{i}.self_attn"] for i in range(3))
        attention -= sum(n for name, n in counts.items() if ".self_attn." in name)
        assert attention == 2 * length * attention_flops(level.shape, length)

    def test_the_cache_of_a_real_model(self) -> None:
        """The bytes equal those of the keys and values of a forward pass."""
        model = tiny_model()
        with torch.no_grad():
            cache = model(
                input_ids=torch.zeros(1, 24, dtype=torch.int64), use_cache=True
            ).past_key_values
        held = sum(
            x.numel() * x.element_size()
            for layer in cache.layers
            for x in (layer.keys, layer.values)
        )
        shape = Shape(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, num_parameters=0)
        assert kv_cache_bytes(shape, 24, element_size=4) == held
        assert kv_bytes_per_token(shape, element_size=4) == held / 24

    def test_window_and_density(self) -> None:
        """A context within the window costs as much as full attention."""
        full = kv_cache_bytes(SHAPE, 1000)
        assert kv_cache_bytes(SHAPE, 1000, density=0.25, window=200) == pytest.approx(
            full * (0.2 + 0.25 * 0.8)
        )
        assert kv_cache_bytes(SHAPE, 100, density=0.25, window=200) == kv_cache_bytes(SHAPE, 100)
        assert kv_bytes_per_token(SHAPE, density=0.25) == 0.25 * kv_bytes_per_token(SHAPE)

    def test_cost_of_a_layout_follows_from_its_keys(self) -> None:
        layout = Layout(("GL", "LL", "GG"), window=16)
        density = layout_density(SHAPE, layout)
        by_head = sum(
            2 * 8 * 2 * (100 if is_global else 16) for is_global in layout.global_mask.ravel()
        )
        assert kv_cache_bytes(SHAPE, 100, density=density, window=16) == pytest.approx(by_head)

    @pytest.mark.parametrize(("sinks", "context"), [(3, 24), (3, 8), (3, 5)])
    def test_sink_tokens_as_a_cache_stores_them(self, sinks: int, context: int) -> None:
        layout, model = Layout(("GL", "LL", "GG", "LL"), window=6, sinks=sinks), tiny_model()
        apply_layout(model, layout)
        cache = SPKVCache(model, page_size=1)
        with torch.no_grad():
            model(
                input_ids=torch.zeros(1, context, dtype=torch.int64),
                past_key_values=cache,
                use_cache=True,
            )
        held = sum(
            int(layer.paged[0].lengths.sum()) + 2 * min(context, 6) for layer in cache.layers
        )
        shape = Shape(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, num_parameters=0)
        cost = kv_cache_bytes(
            shape, context, density=3 / 8, window=layout.window + layout.sinks, element_size=4
        )
        assert cost == pytest.approx(held * 2 * 8 * 4)

    @pytest.mark.parametrize("gated", [False, True])
    def test_shape_of_a_checkpoint(
        self, gated: bool, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Predictors and layouts in a checkpoint do not count, and tied embeddings count once."""
        model = tiny_model(vocab_size=300, tie_word_embeddings=True)
        num_parameters = sum(p.numel() for p in model.parameters()) - 300 * 32
        if gated:
            attach_gates(model, GateConfig(window=6, hidden_size=16))
        else:
            apply_layout(model, Layout(("GL",) * 4, window=6))
        save(model, tiny_tokenizer, tmp_path / "m")
        shape = Shape(
            num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, num_parameters=num_parameters
        )
        assert read_shape(tmp_path / "m") == shape
        assert read_shape(tmp_path / "m" / "config.json") == shape


class TestCostCommand:
    def test_a_level(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Level 8 at 128k: 2 x 21 x 3 x 128 numbers of 2 bytes per token, and 18 of 63 heads of that."""
        layout = Layout(("GGG",) * 6 + ("LLL",) * 15, window=128, strategy="mine")
        layout.write(tmp_path / "mine.yaml")
        main(
            [
                "plan",
                "attention",
                "level-8",
                "--layout",
                str(tmp_path / "mine.yaml"),
                "--density",
                "0.2",
                "--workspace",
                str(tmp_path),
            ]
        )
        output = capsys.readouterr().out
        assert "1,053 M parameters" in output
        for number in (
            "32,256",
            "4,032.00",
            "10.57",
            "12.68",
            "9,216",
            "1,154.81",
            "6,451",
            "809.55",
        ):
            assert f" {number} " in output
        assert not (tmp_path / "reports").exists()

    def test_sink_tokens_of_a_density(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """They count as a window that is as much longer, and their time as that share of a global head."""
        line = [
            "plan",
            "attention",
            "level-8",
            "--context",
            "4k",
            "--density",
            "0.2",
            "-w",
            str(tmp_path),
            "--json",
        ]

        def costs(*options: str) -> dict[str, float]:
            main([*line, *options])
            row: dict[str, float] = json.loads(capsys.readouterr().out)["costs"][-1]
            return row

        plain, sinks, longer = costs(), costs("--sinks", "72"), costs("--window", "200")
        assert sinks == pytest.approx(longer)
        assert sinks["kv_cache_bytes"] > plain["kv_cache_bytes"]
        assert "--sinks applies to --density alone" in fails(capsys, *line[:5], "--sinks", "2")

    def test_the_embedded_model_by_default(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["plan", "attention", "--context", "512"])
        assert "21 layers x 3 KV heads of size 32; 512 tokens" in " ".join(
            capsys.readouterr().out.split()
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["level-11"], "no level 'level-11'"),
            (["level-8", "--model", "x"], "a level of the ladder or --model, not both"),
            (["--model", "/nowhere"], "cannot load model /nowhere"),
            (["level-8", "--context", "many"], "context 'many' is not a number of tokens"),
            (["level-8", "--context", "0"], "at least 1 token; found 0"),
            (["level-8", "--density", "1.5"], "in [0, 1]; found 1.5"),
            (["level-8", "--density", "nan"], "in [0, 1]; found nan"),
            (
                ["level-8", "--layout", "LAYOUT"],
                "is for 2 layers x 2 KV heads, the model has 21 layers x 3 KV heads",
            ),
            (["level-8", "--layout", "none.yaml"], "layout not found"),
        ],
    )
    def test_bad_input(
        self, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Layout(("GL", "LL"), window=4).write(tmp_path / "small.yaml")
        arguments = [
            str(tmp_path / "small.yaml") if option == "LAYOUT" else option for option in options
        ]
        assert message in fails(capsys, "plan", "attention", *arguments)
