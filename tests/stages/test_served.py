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
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.cli import main
from spkv_nas.cost.cache_cost import EngineCost
from spkv_nas.engines.cache import CacheSettings
from spkv_nas.engines.engine import Serving
from spkv_nas.engines.registry import planned_engines
from spkv_nas.engines.vllm import VLLM

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 21, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
    "max_position_embeddings": 32768,
}  # fmt: skip
SERVING = Serving(VLLM, CacheSettings(page_size=128, in_flight=2048))
CPU = ["--engine", "vllm:page-size=128:in-flight-tokens=2048"]  # settings of vLLM on a CPU


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write the config of a model of 21 layers and 2 KV heads of size 32."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


LAYERS = ("GG",) * 9 + ("LL",) * 12  # whole layers
HEADS = ("GL",) * 8 + ("LG",) * 5 + ("LL",) * 8


def write_layout(folder: Path, heads: tuple[str, ...], **settings: Any) -> str:
    """Write a layout; return its path."""
    file = folder / "layout.yaml"
    Layout(heads, **{"window": 128, "strategy": "mine", **settings}).write(file)
    return str(file)


class TestPlan:
    """``plan --engine``; the sizes themselves are tested in tests/cost/test_model_cache.py."""

    def document(self, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
        """Return the JSON document of ``plan``."""
        main(["plan", *options, "--json"])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    def test_capacities_of_a_running_engine(
        self, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """vLLM 0.32 reported them with 4 GiB for a model of 256 bytes a token and layer."""
        layout = write_layout(tmp_path, LAYERS)
        options = [*CPU, "--memory", "4GiB", "--requests", "10", "--layout", layout]
        planned = self.document(capsys, str(config), *options)
        as_is, hybrid = planned["caches"]
        assert (as_is["tokens"], hybrid["tokens"]) == (798_848, 1_306_175)
        assert as_is["request_bytes"] == 21 * 32768 * 256
        assert as_is["bytes"] == 10 * as_is["request_bytes"] + as_is["page_bytes"]
        assert hybrid["name"] == "mine, 18 of 42 heads"
        kinds = {kind["kind"]: kind["layers"] for kind in hybrid["kinds"]}
        assert kinds == {"global": 9, "window 128": 12}
        assert sum(kind["request_bytes"] for kind in hybrid["kinds"]) == hybrid["request_bytes"]

    def test_a_table_for_people(
        self, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        layout = write_layout(tmp_path, HEADS)
        main(["plan", str(config), *CPU, "--memory", "4GiB", "--layout", layout])
        shown = " ".join(capsys.readouterr().out.split())
        assert "vLLM 0.32, requests of 32,768 tokens, bfloat16" in shown
        assert "pages of 128 tokens, 2,048 tokens in flight" in shown
        assert "not counted: pipeline parallelism" in shown
        assert "units of 1 head" in shown
        assert "798,848" in shown

    def test_an_exported_hybrid_is_planned_with_its_layout(
        self, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        section = {
            "stock_type": "llama",
            "num_hidden_layers": 21,
            "layout": {"heads": list(LAYERS), "window": 128},
        }
        layout = write_layout(tmp_path, LAYERS)
        of_layout = self.document(capsys, str(config), *CPU, "--layout", layout)["caches"][1]
        exported = {"model_type": "spkv", "num_hidden_layers": "load with spkv_nas"}
        config.write_text(json.dumps({**CONFIG, **exported, "spkv": section}))
        (as_is,) = self.document(capsys, str(config), *CPU)["caches"]
        assert as_is["request_bytes"] == of_layout["request_bytes"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ["--engine", "none"],
                f"unknown engine 'none'; expected one of {', '.join(planned_engines())}",
            ),
            (
                ["--engine", "vllm:pages=16"],
                "no setting 'pages'; it has page-size, in-flight-tokens, tensor-parallel",
            ),
            (["--engine", "vllm:page-size=0"], "page-size must be a number of tokens, 1 or more"),
            (
                ["--engine", "vllm:tensor-parallel=few"],
                "tensor-parallel must be a number of ranks, 1 or more",
            ),
            (["--engine", "vllm:windows=no"], "windows must be on or off"),
            (["--memory", "1GiB"], "--memory needs --engine"),
            (["--requests", "2"], "--requests needs --engine"),
            (["--engine", "vllm:kv-dtype=float7"], "kv-dtype must be one of float32, bfloat16"),
            (["--engine", "vllm", "--memory", "much"], "'much' is not a size in bytes"),
            (["--engine", "vllm", "--hardware", "h100"], "--hardware applies to the workflow"),
        ],
    )
    def test_mistakes(
        self, options: list[str], message: str, config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert message in fails(capsys, "plan", config, *options)

    @pytest.mark.parametrize(
        ("engine", "heads", "settings", "message"),
        [
            ("vllm", HEADS, {"sinks": 4}, "keeps at most 1 sink token"),
            ("llamacpp", HEADS, {}, "serves layouts of whole layers"),
            ("llamacpp", LAYERS, {"sinks": 1}, "keeps no sink tokens"),
            ("vllm", LAYERS[:3], {}, "is of 3 layers with 2 KV heads, but the model has 21"),
        ],
    )
    def test_layouts_that_are_not_served(
        self,
        engine: str,
        heads: tuple[str, ...],
        settings: dict[str, Any],
        message: str,
        config: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        layout = write_layout(tmp_path, heads, **settings)
        assert message in fails(capsys, "plan", config, "--engine", engine, "--layout", layout)

    def test_too_many_windows(
        self, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "windows.yaml"
        Layout.from_windows([(32, 64)] * 19 + [(128, None), (256, None)]).write(file)
        message = fails(capsys, "plan", config, "--engine", "vllm", "--layout", file)
        assert "serves at most 3 windows" in message


class TestPropose:
    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Path:
        """Write a probe of 21 layers x 3 KV heads."""
        density = np.random.default_rng(0).random((21, 3)).round(4)
        replace(
            make_table(density), record=ProbeRecord.of({"head_dim": 64, "dtype": "bfloat16"})
        ).write(tmp_path / "probes" / "p")
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
