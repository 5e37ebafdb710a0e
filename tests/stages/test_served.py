"""Test budgets in a serving engine: what ``plan --engine`` prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import fails

from spkv_nas.cli import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 21, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
    "max_position_embeddings": 32768,
}  # fmt: skip
CPU = ["--engine", "vllm", "--page-size", "128", "--in-flight-tokens", "2048"]  # settings of vLLM on a CPU


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
    def test_budgets_of_a_running_engine(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """vLLM 0.32 reported these capacities with 4 GiB for a model of 256 bytes a token and layer."""
        engine = planned(capsys, config, *CPU, "--kv-bytes", "4GiB")["engine"]
        tokens = {budget["num_global"] // 2: budget["tokens"] for budget in engine["budgets"]}
        expected = {7: 2_101_191, 8: 1_838_599, 12: 1_306_175, 21: 798_848}
        assert {layers: tokens[layers] for layers in expected} == expected
        assert {budget["num_global"]: budget["instead_of"] for budget in engine["budgets"]}[22] == [18, 20]
        assert engine["cache"]["context"] == 32768
        assert engine["cache"]["dtype"] == "bfloat16"

    def test_without_memory_only_the_bytes_of_a_request(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        budgets = planned(capsys, config, *CPU)["engine"]["budgets"]
        assert {(budget["tokens"], budget["concurrency"]) for budget in budgets} == {(None, None)}
        assert budgets[-1]["request_bytes"] == 21 * 32768 * 256

    def test_a_table_for_people(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["plan", "--model", str(config), "--device", "cpu", *CPU, "--kv-bytes", "4GiB"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "KV cache in vLLM 0.32: requests of 32,768 tokens" in shown
        assert "1,424,929 │ 9, 10 │" in shown
        assert "pages of 128 tokens (--page-size), 2,048 tokens in flight" in shown

    def test_without_an_engine_there_is_none(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "engine" not in planned(capsys, config)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--engine", "none"], "unknown engine 'none'; expected one of vllm"),
            (["--page-size", "16"], "--page-size needs --engine"),
            (["--in-flight-tokens", "16"], "--in-flight-tokens needs --engine"),
            (["--kv-bytes", "1GiB"], "--kv-bytes needs --engine"),
            (["--kv-dtype", "float8"], "--kv-dtype needs --engine"),
            (["--engine", "vllm", "--kv-dtype", "float7"], "--kv-dtype 'float7' is unknown"),
            (["--engine", "vllm", "--kv-bytes", "much"], "'much' is not a size in bytes"),
        ],
    )
    def test_mistakes(self, options: list[str], message: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert message in fails(capsys, "plan", "--model", config, *options)

    def test_sliding_windows_by_design_are_refused(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        sliding = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 11}
        config.write_text(json.dumps({**CONFIG, **sliding, "architectures": ["Qwen2ForCausalLM"]}))
        message = fails(capsys, "plan", "--model", config, "--engine", "vllm", "--device", "cpu")
        assert "10 layers of the model have a sliding window by design" in message
