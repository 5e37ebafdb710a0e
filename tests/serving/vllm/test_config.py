"""Test what the plug-in for vLLM reads from a config, and what it refuses; vLLM is not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import save_with_tokenizer, tiny_model
from transformers import AutoConfig, PreTrainedTokenizerBase

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.engines.vllm import VLLM
from spkv_nas.model import custom_model_type
from spkv_nas.model.attention import GLOBAL_WINDOW, layer_states
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.windows import add_learned_sinks, apply_layout
from spkv_nas.serving.vllm import config as served
from spkv_nas.serving.vllm.config import ServedLayer, prepare, served_layers

# The plug-in imports no plans
assert (VLLM.max_sinks, VLLM.max_windows) == (
    served.MAX_SINKS,
    served.MAX_WINDOWS,
)
LAYOUT = Layout(("GL", "LL", "LG", "GG"), window=5)
SEVERAL = {"heads": ("GN", "LM", "LG", "NN"), "window": 0, "windows": {"L": 3, "M": 5, "N": 9}}
FOUR = {
    "heads": ("GO", "LM", "LG", "NN"),
    "window": 0,
    "windows": {"L": 3, "M": 5, "N": 9, "O": 16},
}
HEAVY = ("pandas", "scipy", "typer", "rich", "pydantic", "transformers", "torch", "vllm", "numpy")


@pytest.fixture(autouse=True)
def _tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_vllm_version", lambda: f"{served.TESTED}.1")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read configs as inside vLLM."""
    monkeypatch.setattr(custom_model_type, "_prepare_for_engine", prepare)


def saved(
    folder: Path, tokenizer: PreTrainedTokenizerBase, family: str = "llama", **layout: Any
) -> Path:
    model = tiny_model(family, vocab_size=300)
    apply_layout(model, Layout(**{"heads": LAYOUT.heads, "window": LAYOUT.window, **layout}))
    save_with_tokenizer(model, tokenizer, folder)
    return folder


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("family", "architecture", "layout"),
    [
        ("llama", "SPKVLlamaForCausalLM", {}),
        ("qwen2", "SPKVQwen2ForCausalLM", SEVERAL),
        ("gemma3_text", "SPKVGemma3ForCausalLM", {}),
        ("gemma3_text", "SPKVGemma3ForCausalLM", SEVERAL),
        ("olmo2", "SPKVTransformersForCausalLM", {}),
    ],
)
def test_an_export_is_read_as_its_original_class(
    family: str,
    architecture: str,
    layout: dict[str, Any],
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = saved(tmp_path / "hybrid", tiny_tokenizer, family, **layout)
    config = AutoConfig.from_pretrained(folder)
    assert type(config).__module__.startswith("transformers.")
    assert config.num_hidden_layers == 4
    assert config.architectures == [architecture]
    layers = served_layers(config.spkv)
    assert list(layers) == [0, 1, 2, 3]
    with monkeypatch.context() as patch:  # our own model has the same windows
        patch.setattr(custom_model_type, "_prepare_for_engine", None)
        states = layer_states(load(folder)[0])
    assert [layer.windows for layer in layers.values()] == [
        tuple(
            None if window == GLOBAL_WINDOW else window
            for window in state.head_windows(gated=False)
        )
        for state in states
    ]


@pytest.mark.usefixtures("engine")
def test_layers_with_a_native_window_keep_it(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Layers 0 and 2 of a Gemma see 4 keys, whatever the letters and the window of the layout."""
    config = AutoConfig.from_pretrained(saved(tmp_path / "hybrid", tiny_tokenizer, "gemma3_text"))
    windows = [layer.windows for layer in served_layers(config.spkv).values()]
    assert windows == [(4, 4), (5, 5), (4, 4), (None, None)]


@pytest.mark.usefixtures("engine")
def test_layers_are_ordered_by_number_not_by_name(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """config.json sorts layer 10 before layer 2."""
    rows = ("GG", *["LL"] * 10, "GL")
    model = tiny_model("llama", vocab_size=300, num_hidden_layers=12)
    apply_layout(model, Layout(rows, 5))
    save(model, tiny_tokenizer, tmp_path / "hybrid")
    config = AutoConfig.from_pretrained(tmp_path / "hybrid")
    windows = {"G": None, "L": 5}
    expected = {
        index: ServedLayer(None, False, tuple(windows[head] for head in row))
        for index, row in enumerate(rows)
    }
    assert served_layers(config.spkv) == expected


@pytest.mark.usefixtures("engine")
def test_learned_sinks_are_read(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny_model("llama", vocab_size=300)
    apply_layout(model, LAYOUT)
    add_learned_sinks(model)
    save(model, tiny_tokenizer, tmp_path / "hybrid")
    layers = served_layers(AutoConfig.from_pretrained(tmp_path / "hybrid").spkv)
    assert [layer.learned_sinks for layer in layers.values()] == [
        "L" in row for row in LAYOUT.heads
    ]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("family", "expected"), [("llama", [1, 1, 1, 0]), ("gemma3_text", [0, 1, 0, 0])]
)
def test_a_sink_token_is_read(
    family: str, expected: list[int], tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Layers 0 and 2 of a Gemma have a window of their own, and no sink token."""
    config = AutoConfig.from_pretrained(saved(tmp_path / "hybrid", tiny_tokenizer, family, sinks=1))
    assert [layer.sinks for layer in served_layers(config.spkv).values()] == expected


@pytest.mark.usefixtures("engine")
def test_heads_with_the_native_window_of_all_layers_take_no_sinks() -> None:
    """Global heads of Mistral 7B v0.1 see its sliding window."""
    model = tiny_model("mistral", vocab_size=300, sliding_window=20)
    apply_layout(model, Layout(LAYOUT.heads, LAYOUT.window, sinks=1))
    layers = list(served_layers(model.config.spkv).values())
    assert [layer.sinks for layer in layers] == [int("L" in row) for row in LAYOUT.heads]
    for layer, row in zip(layers, LAYOUT.heads, strict=True):
        assert [layer.takes_sinks(window) for window in layer.windows] == [
            letter == "L" for letter in row
        ]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"sinks": 2}, r"see the first 2 tokens[^\n]*at most 1 sink token\nconvert .* --sinks 1"),
        (FOUR, r"have 4 windows, but vLLM serves at most 3[^\n]*\nchoose a layout with fewer"),
    ],
)
def test_what_vllm_does_not_keep_is_refused(
    layout: dict[str, Any], message: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UserError, match=message):
        AutoConfig.from_pretrained(saved(tmp_path / "hybrid", tiny_tokenizer, **layout))


@pytest.mark.usefixtures("engine")
def test_a_sink_token_beside_learned_sinks_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = tiny_model("llama", vocab_size=300)
    apply_layout(model, Layout(LAYOUT.heads, LAYOUT.window, sinks=1))
    add_learned_sinks(model)
    save(model, tiny_tokenizer, tmp_path / "hybrid")
    with pytest.raises(UserError, match="a sink token and learned sinks"):
        AutoConfig.from_pretrained(tmp_path / "hybrid")


@pytest.mark.usefixtures("engine")
def test_gates_are_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny_model("llama", vocab_size=300)
    spkv_nas.attach_gates(model, spkv_nas.GateConfig(window=5))
    save(model, tiny_tokenizer, tmp_path / "gated")
    with pytest.raises(UserError, match="decide token by token"):
        AutoConfig.from_pretrained(tmp_path / "gated")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("version", ["0.31.1", "0.33.0", "1.0"])
def test_versions_that_were_not_tested_are_refused(
    version: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = saved(tmp_path / "hybrid", tiny_tokenizer)
    monkeypatch.setattr(served, "_vllm_version", lambda: version)
    with pytest.raises(UserError, match=rf"{version} is installed"):
        AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "has no layout"),
        (
            {
                "layout": {"heads": ["G"], "window": 4},
                "layers": {"model.layers.0.a": {}, "model.layers.1.a": {}},
            },
            "1 rows",
        ),
        (
            {"layout": {"heads": ["G"], "window": 4}, "layers": {"model.attention": {}}},
            "one number",
        ),
        (
            {"layout": {"heads": ["M"], "window": 4}, "layers": {"model.layers.0.a": {}}},
            "no window for heads M",
        ),
        (
            {"layout": {"heads": ["G", "GL"], "window": 4}, "layers": {"model.layers.0.a": {}}},
            "different numbers",
        ),
    ],
)
def test_damaged_and_unequal_sections_are_refused(section: dict[str, Any], message: str) -> None:
    config = tiny_model("llama").config
    config.spkv = section
    with pytest.raises(UserError, match=message):
        prepare(config)


@pytest.mark.parametrize(
    ("family", "options", "saved_layer", "message"),
    [
        ("falcon_h1", {}, {}, "keep states besides keys"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, {}, "keep states besides keys"),
        ("llama", {}, {"reads": "model.layers.1.a"}, "read the keys of other layers"),
        ("deepseek_v3", {}, {}, "keep latents"),
    ],
)
def test_layers_that_keep_something_else_are_refused(
    family: str, options: dict[str, Any], saved_layer: dict[str, Any], message: str
) -> None:
    """vLLM would run a Falcon-H1 without the states of its Mamba layers, in which one pass hardly differs."""
    config = AutoConfig.for_model(family, num_hidden_layers=2, **options)
    config.spkv = {
        "layout": {"heads": ["G"], "window": 4},
        "layers": {"model.layers.0.a": saved_layer},
    }
    with pytest.raises(UserError, match=message):
        prepare(config)


@pytest.mark.parametrize(
    ("family", "backend"), [("olmo2", "Transformers"), ("qwen3_moe", "TransformersMoE")]
)
def test_mixtures_of_experts_have_a_backend_of_their_own(family: str, backend: str) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=1)
    config.spkv = {"layout": {"heads": ["G"], "window": 4}, "layers": {"model.layers.0.a": {}}}
    prepare(config)
    assert config.architectures == [f"SPKV{backend}ForCausalLM"]


def test_the_entry_point_imports_nothing_heavy() -> None:
    program = "import sys, spkv_nas.serving.vllm.plugin; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {name.partition(".")[0] for name in run.stdout.split()} & set(HEAVY)


@pytest.mark.slow
def test_reading_a_config_imports_no_model_code() -> None:
    """As inside vLLM, where transformers is imported already."""
    program = (
        "import sys, transformers.models.auto.configuration_auto, spkv_nas.serving.vllm.plugin\n"
        "from spkv_nas.model.custom_model_type import read_for_engine\n"
        "print(*(name for name in sys.modules if name.startswith(('spkv_nas.', 'spkv_kernels.', 'pandas', 'typer'))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = set(run.stdout.split())
    assert names <= {
        "spkv_kernels.threads",
        *(f"spkv_nas.artifacts{name}" for name in ("", ".local_layers")),
        *(f"spkv_nas.base{name}" for name in ("", ".errors", ".extras", ".limits")),
        *(f"spkv_nas.model{name}" for name in ("", ".custom_model_type")),
        *(f"spkv_nas.serving{name}" for name in ("", ".vllm", ".vllm.config", ".vllm.plugin")),
    }
    assert "spkv_nas.model.custom_model_type" in names
