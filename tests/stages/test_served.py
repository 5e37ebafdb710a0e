"""Test budgets in a serving engine: what ``plan`` and ``propose`` count, print and refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import fails, make_table

from spkv_nas.artifacts.layout import Layout
from spkv_nas.cli import main
from spkv_nas.cost.cache_cost import EngineCost
from spkv_nas.engines.engine import Serving
from spkv_nas.engines.registry import planned_engines
from spkv_nas.engines.vllm import VLLM

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 21, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
    "max_position_embeddings": 32768,
}  # fmt: skip
SERVING = Serving(VLLM, page_size=128, in_flight=2048)
CPU = ["--engine", "vllm:page-size=128:in-flight-tokens=2048"]  # settings of vLLM on a CPU


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write the config of a model of 21 layers and 2 KV heads of size 32."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def planned(capsys: pytest.CaptureFixture[str], config: Path, *options: str) -> dict[str, Any]:
    """Return the JSON document of ``plan``."""
    main(["plan", "--model", str(config), "--device", "cpu", "--json", *options])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


class TestPlan:
    def test_budgets_of_a_running_engine(
        self, config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """vLLM 0.32 reported these capacities with 4 GiB for a model of 256 bytes a token and layer."""
        engine = planned(capsys, config, *CPU, "--kv-bytes", "4GiB")["engine"]
        tokens = {budget["num_global"] // 2: budget["tokens"] for budget in engine["budgets"]}
        expected = {7: 2_101_191, 8: 1_838_599, 12: 1_306_175, 21: 798_848}
        assert {layers: tokens[layers] for layers in expected} == expected
        assert [budget["num_global"] for budget in engine["budgets"]] == [
            2 * layers for layers in range(1, 22)
        ]
        assert engine["cache"]["context"] == 32768
        assert engine["cache"]["dtype"] == "bfloat16"

    def test_without_memory_only_the_bytes_of_a_request(
        self, config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        budgets = planned(capsys, config, *CPU)["engine"]["budgets"]
        assert {(budget["tokens"], budget["concurrency"]) for budget in budgets} == {(None, None)}
        assert budgets[-1]["request_bytes"] == 21 * 32768 * 256

    def test_a_table_for_people(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["plan", "--model", str(config), "--device", "cpu", *CPU, "--kv-bytes", "4GiB"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "KV cache in vLLM 0.32: requests of 32,768 tokens" in shown
        assert "1,424,929 │" in shown
        assert "pages of 128 tokens (page-size), 2,048 tokens in flight" in shown

    def test_without_an_engine_there_is_none(
        self, config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "engine" not in planned(capsys, config)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ["--engine", "none"],
                f"unknown engine 'none'; expected one of {', '.join(planned_engines())}",
            ),
            (
                ["--engine", "vllm:pages=16"],
                "no setting 'pages'; it has page-size, in-flight-tokens, kv-dtype",
            ),
            (["--engine", "vllm:page-size=0"], "page-size must be a number of tokens, 1 or more"),
            (
                ["--engine", "vllm:in-flight-tokens=few"],
                "in-flight-tokens must be a number of tokens, 1 or more",
            ),
            (["--kv-bytes", "1GiB"], "--kv-bytes needs --engine"),
            (["--engine", "vllm:kv-dtype=float7"], "kv-dtype must be one of float32, bfloat16"),
            (["--engine", "vllm", "--kv-bytes", "much"], "'much' is not a size in bytes"),
        ],
    )
    def test_mistakes(
        self, options: list[str], message: str, config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert message in fails(capsys, "plan", "--model", config, *options)

    def test_sliding_windows_by_design_are_refused(
        self, config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sliding = {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 11,
        }
        config.write_text(json.dumps({**CONFIG, **sliding, "architectures": ["Qwen2ForCausalLM"]}))
        for command in (["plan", "--device", "cpu"], ["plan", "attention", "--context", "1k"]):
            message = fails(capsys, *command, "--model", config, "--engine", "vllm")
            assert "10 layers of the model have a sliding window by design" in message


class TestPlanAttention:
    """Level 8 of the paper's ladder has 21 layers of 3 KV heads of size 128."""

    @pytest.fixture
    def layouts(self, tmp_path: Path) -> list[str]:
        """Write layouts of whole layers and of single heads; return the options that name them."""
        files = {
            "layers": ("GGG",) * 9 + ("LLL",) * 12,
            "heads": ("GLL",) * 8 + ("GGL",) * 5 + ("LLL",) * 8,
        }
        for name, heads in files.items():
            Layout(heads, window=128, strategy=name).write(tmp_path / f"{name}.yaml")
        return [option for name in files for option in ("--layout", str(tmp_path / f"{name}.yaml"))]

    def attention(self, capsys: pytest.CaptureFixture[str], *options: str) -> str:
        """Return what ``plan attention`` prints, on one line."""
        main(["plan", "attention", "level-8", "--context", "32k", *options])
        return " ".join(capsys.readouterr().out.split())

    def test_layouts_in_an_engine(
        self, layouts: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        document = json.loads(
            self.attention(capsys, *layouts, *CPU, "--kv-bytes", "24GiB", "--json")
        )["engine"]
        forms = {row["name"]: (row["form"], row["tokens"]) for row in document["layouts"]}
        # Six times the bytes of 64 numbers a token
        assert forms["full attention"] == (
            "whole layers",
            798_848,
        )
        assert forms["layers, 27 of 63 heads"] == ("whole layers", 1_306_175)
        assert forms["heads, 18 of 63 heads"][0] == "units of 1 head"

    def test_a_table_for_people(
        self, layouts: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = self.attention(capsys, *layouts, *CPU, "--kv-bytes", "24GiB")
        assert "KV cache in vLLM 0.32: requests of 32,768 tokens" in shown
        assert "1,306,175" in shown
        assert "KV cache in" not in self.attention(capsys, *layouts)

    def test_mistakes(
        self, layouts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refused(*options: str) -> str:
            return fails(capsys, "plan", "attention", "level-8", "--context", "1k", *options)

        assert "--kv-bytes needs --engine" in refused("--kv-bytes", "1GiB")
        assert "unknown engine 'llamacpp'; expected one of vllm" in refused(
            *layouts, "--engine", "llamacpp"
        )
        Layout(("GLL",) * 21, window=128, strategy="mine", sinks=4).write(tmp_path / "sinks.yaml")
        assert "keeps at most 1 sink token" in refused(
            *CPU, "--layout", str(tmp_path / "sinks.yaml")
        )
        Layout.from_windows([(32, 64, 128)] * 20 + [(256, None, None)]).write(
            tmp_path / "windows.yaml"
        )
        assert "serves at most 3 windows" in refused(
            *CPU, "--layout", str(tmp_path / "windows.yaml")
        )


class TestPropose:
    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Path:
        """Write a probe of 21 layers x 3 KV heads."""
        density = np.random.default_rng(0).random((21, 3)).round(4)
        replace(make_table(density), metadata={"head_dim": 64, "dtype": "bfloat16"}).write(
            tmp_path / "probes" / "p"
        )
        return tmp_path

    @pytest.fixture
    def options(self, workspace: Path) -> list[str]:
        """Options of 10 requests of 32,768 tokens in vLLM on a CPU."""
        served = [*CPU, "--context", "32k", "--batch", "10"]
        return ["-w", str(workspace), "--window", "128", *served]

    def propose(self, capsys: pytest.CaptureFixture[str], *options: str) -> str:
        """Return what ``propose`` prints, on one line."""
        main(["propose", *options])
        printed = capsys.readouterr()
        return " ".join((printed.out + printed.err).split())

    def test_a_larger_budget_for_the_same_memory(
        self, options: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = self.propose(capsys, *options, "--budget", "27")
        assert (
            "3.01 GiB in vLLM 0.32 at 32,768 tokens x 10, pages of 128 tokens, 2,048 tokens in flight"
            in shown
        )
        assert "36 global heads take no more memory there than 27" in shown
        assert "take no more memory" not in self.propose(capsys, *options, "--budget", "24")
        assert "3.01 GiB in vLLM 0.32" in self.propose(capsys, *options, "--budget", "36")

    def test_the_memory_of_every_layout(
        self, workspace: Path, options: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A layout of whole layers takes what the budget does; a scattered one at most as much."""
        shown = self.propose(capsys, *options, "--budget", "27")
        memory = pd.read_csv(workspace / "layouts" / "p" / "coverage.csv").set_index("strategy")[
            "kv_bytes"
        ]
        total = EngineCost(32768, 10, 128, 64, "bfloat16", serving=SERVING).total(27, 63)
        assert memory["interleaved-first"] == memory.max() == total
        assert memory["densest"] <= total
        assert "coverage % ┃ memory" in shown

    def test_a_budget_in_bytes(
        self, workspace: Path, options: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = self.propose(capsys, *options, "--kv-bytes", "3.02GiB")
        assert "3.02GiB has room for 36 global heads: 3.01 GiB in vLLM 0.32" in shown
        assert Layout.read(workspace / "layouts" / "p" / "densest.yaml").num_global == 36
        linear = options[:4] + options[4 + len(CPU) :]
        assert "has room for 38 global heads" in self.propose(
            capsys, *linear, "--kv-bytes", "3.02GiB"
        )

    def test_a_solution_below_the_budget_still_fits(
        self, workspace: Path, options: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The constraints leave 26 of the 36 global heads that fit; 26 take more memory than 36, and 25 less."""
        fixed = ["--constraint", "local-layers=13-20", "--constraint", "max-per-layer=2"]
        self.propose(capsys, *options, "--kv-bytes", "3.02GiB", *fixed)
        layout = Layout.read(workspace / "layouts" / "p" / "constrained.yaml")
        assert layout.num_global == 25

    def test_every_budget_of_a_range(
        self, workspace: Path, options: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = self.propose(capsys, *options, "--budget", "24..36:3")
        rows = pd.read_csv(workspace / "layouts" / "p" / "budgets.csv").set_index("budget")
        assert rows["max_heads_same_memory"].to_dict() == {24: 24, 27: 36, 30: 33, 33: 33, 36: 36}
        assert rows["kv_bytes"][27] == rows["kv_bytes"][36] > rows["kv_bytes"][33]
        assert (
            "heads, same memory: the largest number of global heads that takes no more memory in the engine"
            in shown
        )

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (["--engine", "none"], "unknown engine 'none'"),
            (
                ["--kv-bytes", "1MiB"],
                "1.00 MiB is too small in vLLM 0.32: 10 requests of 32,768 tokens need at least",
            ),
            (
                ["--sinks", "4"],
                "vLLM 0.32 keeps at most 1 sink token for local heads, but the layout has 4",
            ),
        ],
    )
    def test_mistakes(
        self,
        changed: list[str],
        message: str,
        workspace: Path,
        options: list[str],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert message in fails(capsys, "propose", *options, *changed)
        assert not (workspace / "layouts").exists()

    def test_an_engine_needs_a_context(
        self, workspace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        message = fails(capsys, "propose", "-w", workspace, "--engine", "vllm")
        assert "--engine needs --context, the maximum number of tokens of a request" in message
