"""Test what published models keep, against formulas by hand, and against transformers' configs and caches."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from spkv_nas.base.errors import UserError
from spkv_nas.cost import model_cache
from spkv_nas.cost.model_cache import config_cache, read_model_cache
from spkv_nas.engines.cache import LayerCache
from spkv_nas.engines.registry import read_serving

# Keys of published configs on which their caches depend: defaults of the classes of transformers 5.23, or values as
# published, of which those of gpt-oss, Command R7B, OLMo 3, Gemma 2 and LFM2 were not compared with the published files
PUBLISHED = ROOT / "tests" / "published"
NAMES = sorted(file.stem for file in PUBLISHED.glob("*.json"))
CONTEXT = 32768
GLOBAL = 2048  # pages of 16 tokens in vLLM


def config(name: str) -> dict[str, Any]:
    """Return the published config of a model."""
    content: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())
    return content


def request(name: str, engine: str, context: int = CONTEXT) -> int:
    """Return the bytes of a request in an engine."""
    model = read_model_cache(PUBLISHED / f"{name}.json")
    return read_serving(engine, any_layout=False).plan(model, context).request_bytes


# In vLLM a request takes its context in pages of 16 tokens in every group of global layers, and in every group of
# layers with a window w the pages of w - 1 tokens and of 16,384 in flight, and one more: ceil((w + 16383) / 16) + 1,
# which is 1281 for 4,096, 1089 for 1,024, 1057 for 512, 1033 for 128 and 129. A group has as many layers as the rarest
# kind.
VLLM = {
    # 21 layers of each kind; 2 * 8 * 256 numbers a token
    "gemma-2-9b": (GLOBAL + 1281) * 16 * 8192 * 21,
    # 5 global layers and 29 others: 1 and 6 groups of 5
    "gemma-3-4b": (GLOBAL + 6 * 1089) * 16 * 4096 * 5,
    # 20 of 30 layers have keys, 4 of them global
    "gemma-3n-e2b": (GLOBAL + 4 * 1057) * 16 * 2048 * 4,
    # 24 of 42 have keys, the 4 global ones of twice the size, so that pages of the others have 32 tokens
    "gemma-4-e4b": (GLOBAL + 5 * 529) * 16 * 4096 * 4,
    "gpt-oss-20b": (GLOBAL + 1033) * 16 * 2048 * 12,
    # A state: 3 * 8192 + 32 * 128 * 128 numbers in bfloat16, 1,097,728 bytes, for which a page has 544 tokens, the next
    # multiple of 16; 36 states in 3 groups of 12, two pages each, beside ceil(32768 / 544) = 61
    "qwen3-next-80b-a3b": (61 + 3 * 2) * 544 * 2048 * 12,
    # The same with 524,288 numbers in float32: pages of 1,056 tokens
    "qwen3.5-35b-a3b": (32 + 3 * 2) * 1056 * 2048 * 10,
    # 9 global layers of 4 * (192 + 128) numbers, 39 others of twice as many in 5 groups of 9
    "mimo-v2-flash": (GLOBAL // 2 + 5 * 1033) * 16 * 5120 * 9,
    "command-r7b": (GLOBAL + 3 * 1281) * 16 * 4096 * 8,
    "olmo-3-7b": (GLOBAL + 3 * 1281) * 16 * 16384 * 8,
    "glm-4.5-air": CONTEXT * 4096 * 46,
    "glm-4.7-flash": CONTEXT * 2 * (512 + 64) * 47,
    # A state: 3 * (3072 + 2 * 128) + 48 * 64 * 128 numbers, 806,400 bytes: pages of 400 tokens; 36 in 9 groups of 4
    "granite-4.0-h-tiny": (82 + 9 * 2) * 400 * 2048 * 4,
    # A state: 2 * 2048 numbers, within a page of 16 tokens; 10 in 2 groups of 6
    "lfm2-1.2b": (GLOBAL + 2 * 2) * 16 * 2048 * 6,
    # 3 * (8192 + 2 * 8 * 128) numbers in bfloat16 and 8192 * 128 in float32: pages of 1,040 tokens; 24 in 6 groups of 4
    "nemotron-h-8b": (32 + 6 * 2) * 1040 * 4096 * 4,
    # 3 * 8192 + 8192 * 16 numbers: pages of 80 tokens; 28 in 7 groups of 4
    "jamba-v0.1": (410 + 7 * 2) * 80 * 4096 * 4,
    "mistral-7b-v0.1": 1281 * 16 * 4096 * 32,
}
# llama.cpp has the window and a batch of 512 in layers with one, padded to 256 cells, and states in float32
LLAMA_CPP = {
    "gemma-2-9b": (CONTEXT + 4608) * 8192 * 21,
    "gemma-3-4b": (5 * CONTEXT + 29 * 1536) * 4096,
    "gemma-3n-e2b": (4 * CONTEXT + 16 * 1024) * 2048,
    "gemma-4-e4b": 4 * CONTEXT * 4096 + 20 * 1024 * 2048,
    "gpt-oss-20b": (CONTEXT + 768) * 2048 * 12,
    "qwen3-next-80b-a3b": 12 * CONTEXT * 2048 + 36 * 4 * (24576 + 524288),
    "qwen3.5-35b-a3b": 10 * CONTEXT * 2048 + 30 * 4 * (24576 + 524288),
    "mimo-v2-flash": 9 * CONTEXT * 2560 + 39 * 768 * 5120,
    "command-r7b": (8 * CONTEXT + 24 * 4608) * 4096,
    "olmo-3-7b": (8 * CONTEXT + 24 * 4608) * 16384,
    "glm-4.5-air": CONTEXT * 4096 * 46,
    "glm-4.7-flash": CONTEXT * 2 * 576 * 47,
    "granite-4.0-h-tiny": 4 * CONTEXT * 2048 + 36 * 4 * (9984 + 393216),
    "lfm2-1.2b": 6 * CONTEXT * 2048 + 10 * 4 * 4096,
    "nemotron-h-8b": 4 * CONTEXT * 4096 + 24 * 4 * (30720 + 1048576),
    "jamba-v0.1": 4 * CONTEXT * 4096 + 28 * 4 * (24576 + 131072),
    # Of architecture llama, which has no window there
    "mistral-7b-v0.1": CONTEXT * 4096 * 32,
}
# mlx-lm writes over the oldest tokens of a window; the recurrent part of a state is in float32
MLX = {
    "gemma-2-9b": CONTEXT * 8192 * 42,  # keeps all tokens
    "gemma-3-4b": (5 * CONTEXT + 29 * 1024) * 4096,
    "gemma-4-e4b": 4 * CONTEXT * 4096 + 20 * 512 * 2048,
    "gpt-oss-20b": (CONTEXT + 128) * 2048 * 12,
    "qwen3-next-80b-a3b": 12 * CONTEXT * 2048 + 36 * (2 * 24576 + 4 * 524288),
    "lfm2-1.2b": 6 * CONTEXT * 2048 + 10 * 2 * 4096,
}
# ONNX Runtime GenAI keeps 16 tokens more than the window on a CPU
ONNX_RUNTIME = {
    "gemma-3-4b": (5 * CONTEXT + 29 * 1040) * 4096,
    "gpt-oss-20b": (CONTEXT + 144) * 2048 * 12,
    "lfm2-1.2b": 6 * CONTEXT * 2048 + 10 * 2 * 3 * 2048,
}
# SGLang has 0.8 tokens of layers with a window for each of the others, whatever the window, and for each byte of keys
# and values 0.9 of states, of which a request has three
SGLANG = {
    "gemma-3-4b": 34 * CONTEXT * 4096,  # in one pool
    "gpt-oss-20b": int(1.8 * CONTEXT * 2048 * 12),
    "glm-4.7-flash": CONTEXT * 2 * 576 * 47,
    "lfm2-1.2b": int(1.9 * 6 * CONTEXT * 2048),
}
EXPECTED = {
    "vllm": VLLM, "llamacpp": LLAMA_CPP, "mlx": MLX, "onnxruntime": ONNX_RUNTIME, "sglang": SGLANG,
}  # fmt: skip


def test_every_published_model_is_planned() -> None:
    assert sorted(VLLM) == sorted(LLAMA_CPP) == NAMES


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine, sizes in EXPECTED.items() for name in sizes]
)
def test_a_request_takes_what_the_engine_allocates(engine: str, name: str) -> None:
    assert request(name, engine) == pytest.approx(EXPECTED[engine][name], abs=8)


@pytest.mark.parametrize(
    ("name", "engine", "expected"),
    [
        # Pages of 128 tokens: 128 and ceil((127 + 16384) / 128) + 1
        ("gpt-oss-20b", "vllm:page-size=128", (256 + 130) * 128 * 2048 * 12),
        ("gpt-oss-20b", "vllm:in-flight-tokens=2048", (GLOBAL + 137) * 16 * 2048 * 12),
        ("gpt-oss-20b", "vllm:kv-dtype=float8", (GLOBAL + 1033) * 16 * 1024 * 12),
        ("gpt-oss-20b", "vllm:tensor-parallel=2", (GLOBAL + 1033) * 16 * 1024 * 12),
        # More ranks than KV heads: each has one
        ("gpt-oss-20b", "vllm:tensor-parallel=16", (GLOBAL + 1033) * 16 * 256 * 12),
        ("gpt-oss-20b", "vllm:windows=off", GLOBAL * 16 * 2048 * 24),
        # All layers keep all tokens, and pages of their own size
        ("mimo-v2-flash", "vllm:windows=off", CONTEXT * (9 * 2560 + 39 * 5120)),
        # A latent is on every rank
        ("glm-4.7-flash", "vllm:tensor-parallel=4", CONTEXT * 2 * 576 * 47),
        ("qwen3-next-80b-a3b", "vllm:prefix-caching=off", (61 + 3) * 544 * 2048 * 12),
        # One KV head, and a quarter of the state: pages of 272 tokens
        ("qwen3-next-80b-a3b", "vllm:tensor-parallel=4", (121 + 6) * 272 * 1024 * 12),
        # The one group of B and C is on both ranks: 3 * (1536 + 256) + 196,608 numbers, 403,968 bytes
        ("granite-4.0-h-tiny", "vllm:tensor-parallel=2", (82 + 18) * 400 * 1024 * 4),
        ("gpt-oss-20b", "llamacpp:kv-dtype=q8_0", (CONTEXT + 768) * 1088 * 12),
        ("gpt-oss-20b", "llamacpp:in-flight-tokens=2048", (CONTEXT + 2304) * 2048 * 12),
        ("gpt-oss-20b", "llamacpp:windows=off", CONTEXT * 2048 * 24),
        ("gpt-oss-20b", "sglang:windows=off", CONTEXT * 2048 * 24),
    ],
)
def test_settings_change_it(name: str, engine: str, expected: int) -> None:
    assert request(name, engine) == expected


def test_a_short_context_fits_in_the_window() -> None:
    """A window never holds more than the context; vLLM adds a page."""
    assert request("gemma-3-4b", "vllm", 512) == (32 + 6 * 33) * 16 * 4096 * 5
    assert request("gemma-3-4b", "llamacpp", 500) == 34 * 512 * 4096
    assert request("gemma-3-4b", "mlx", 500) == 34 * 512 * 4096


def test_what_is_not_kept_is_named() -> None:
    gemma = read_model_cache(PUBLISHED / "gemma-3n-e2b.json")
    assert (gemma.num_shared, len(gemma.layers)) == (10, 20)
    sinks = {name: read_model_cache(PUBLISHED / f"{name}.json").num_learned_sinks for name in NAMES}
    assert {name: number for name, number in sinks.items() if number} == {
        "gpt-oss-20b": 24,
        "mimo-v2-flash": 39,
    }
    kept = read_serving("mlx", any_layout=False).plan(
        read_model_cache(PUBLISHED / "gemma-2-9b.json"), CONTEXT
    )
    assert kept.notes == ("keeps all tokens in the layers of gemma2 that have a window",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 2048}, r"keep what is not counted here \(index_topk\)"),
        ({"attention_chunk_size": 8192}, r"not counted here \(attention_chunk_size\)"),
        ({"linear_attn_config": {"kda_layers": [1]}}, r"not counted here \(linear_attn_config\)"),
        ({"attn_type_list": [0, 1]}, r"not counted here \(attn_type_list\)"),
        ({"layer_types": ["retention"] * 46}, "layers of type retention"),
        ({"layer_types": ["linear_attention"] * 46}, "no sizes of a linear layer are known"),
        ({"num_attention_heads": None}, "without the key 'num_attention_heads'"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ],
)
def test_caches_that_are_not_known_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_cache({**config("glm-4.5-air"), **changes}, "config x.json")


@pytest.mark.parametrize(
    ("keys", "heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
    ],
)
def test_falcon_names_its_kv_heads_in_its_own_way(keys: dict[str, Any], heads: int) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 4544, "num_attention_heads": 71}
    model = config_cache({"model_type": "falcon", **sizes, **keys}, "config")
    assert [(layer.num_heads, layer.key_dim) for layer in model.layers] == [(heads, 64)] * 2


def gguf(file: Path, **keys: Any) -> Path:
    """Write the header of a GGUF file without tensors, with a vocabulary in front of the other keys."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def typed(value: Any) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, bool):
            return struct.pack("<I?", 7, value)
        if isinstance(value, int):
            return struct.pack("<II", 4, value)
        kind = 8 if isinstance(value[0], str) else 7 if isinstance(value[0], bool) else 4
        elements = b"".join(
            text(one) if kind == 8 else struct.pack("<?" if kind == 7 else "<I", one)
            for one in value
        )
        return struct.pack("<IIQ", 9, kind, len(value)) + elements

    architecture = keys.pop("architecture")
    named = {"tokenizer.ggml.tokens": ["a", "bc"], "general.architecture": architecture}
    named |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    content = b"".join(text(key) + typed(value) for key, value in named.items())
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(named)) + content)
    return file


# Keys that llama.cpp's converter writes
GGUF: dict[str, dict[str, Any]] = {
    "gemma-3-4b": {
        "architecture": "gemma3", "block_count": 34, "attention__head_count": 8, "attention__head_count_kv": 4,
        "attention__key_length": 256, "attention__value_length": 256, "attention__sliding_window": 1024,
    },
    "gemma-3n-e2b": {
        "architecture": "gemma3n", "block_count": 30, "attention__head_count": 8, "attention__head_count_kv": 2,
        "attention__key_length": 256, "attention__value_length": 256, "attention__sliding_window": 512,
    },
    "gemma-4-e4b": {
        "architecture": "gemma4", "block_count": 42, "attention__head_count": 8, "attention__head_count_kv": 2,
        "attention__key_length": 512, "attention__value_length": 512, "attention__key_length_swa": 256,
        "attention__value_length_swa": 256, "attention__sliding_window": 512, "attention__shared_kv_layers": 18,
        "attention__sliding_window_pattern": [(layer + 1) % 6 != 0 for layer in range(42)],
    },
    "gpt-oss-20b": {
        "architecture": "gpt-oss", "block_count": 24, "attention__head_count": 64, "attention__head_count_kv": 8,
        "attention__key_length": 64, "attention__value_length": 64, "attention__sliding_window": 128,
    },
    "olmo-3-7b": {
        "architecture": "olmo2", "block_count": 32, "embedding_length": 4096, "attention__head_count": 32,
        "attention__head_count_kv": 32, "attention__sliding_window": 4096,
    },
    "qwen3-next-80b-a3b": {
        "architecture": "qwen3next", "block_count": 48, "attention__head_count": 16, "attention__head_count_kv": 2,
        "attention__key_length": 256, "attention__value_length": 256, "ssm__conv_kernel": 4, "ssm__inner_size": 4096,
        "ssm__state_size": 128, "ssm__group_count": 16, "ssm__time_step_rank": 32,
    },
    "glm-4.7-flash": {
        "architecture": "deepseek2", "block_count": 48, "nextn_predict_layers": 1, "attention__head_count": 20,
        "attention__head_count_kv": 1, "attention__kv_lora_rank": 512, "rope__dimension_count": 64,
        "attention__key_length": 576, "attention__value_length": 512,
    },
    "lfm2-1.2b": {
        "architecture": "lfm2", "block_count": 16, "embedding_length": 2048, "attention__head_count": 32,
        "attention__head_count_kv": [8 if layer in (2, 5, 8, 10, 12, 14) else 0 for layer in range(16)],
        "shortconv__l_cache": 3,
    },
    "jamba-v0.1": {
        "architecture": "jamba", "block_count": 32, "embedding_length": 4096, "attention__head_count": 32,
        "attention__head_count_kv": [8 if layer % 8 == 4 else 0 for layer in range(32)],
        "ssm__conv_kernel": 4, "ssm__inner_size": 8192, "ssm__state_size": 16,
    },
    "mistral-7b-v0.1": {
        "architecture": "llama", "block_count": 32, "embedding_length": 4096, "attention__head_count": 32,
        "attention__head_count_kv": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF)
def test_the_header_of_a_gguf_file_says_as_much_as_a_config(name: str, tmp_path: Path) -> None:
    file = gguf(tmp_path / "model.gguf", **GGUF[name])
    model = read_model_cache(file)
    plan = read_serving("llamacpp", any_layout=False).plan(model, CONTEXT)
    assert plan.request_bytes == LLAMA_CPP[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"PK" + data[2:], "does not begin with GGUF"),
        (lambda data: data[:60], "its header is damaged"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version 9 is unknown"),
        (lambda data: b"", "cannot read model"),
    ],
)
def test_damaged_headers(change: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    file = gguf(tmp_path / "model.gguf", **GGUF["gpt-oss-20b"])
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=message):
        read_model_cache(file)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """The command runs from the base installation, without torch, transformers or pandas."""
    program = (
        "import sys; from spkv_nas.cli import main; "
        f"main(['plan', {str(PUBLISHED / 'gemma-3-4b.json')!r}, '--engine', 'vllm', '--context', '8k']); "
        "print([name for name in ('torch', 'transformers', 'pandas', 'scipy') if name in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert completed.stdout.splitlines()[-1] == "[]"


class TestTransformers:
    """Configs are read as transformers reads them."""

    @pytest.mark.parametrize("family", sorted(model_cache._DEFAULTS))
    def test_defaults_are_those_of_the_class(self, family: str) -> None:
        from transformers import AutoConfig

        class_config = AutoConfig.for_model(family)
        defaults = dict(model_cache._DEFAULTS[family])
        # Gemma 4 has them by layer
        by_layer = ("global_head_dim", "head_dim") if family == "gemma4_text" else ()
        known = {key: value for key, value in defaults.items() if key not in by_layer}
        assert {key: getattr(class_config, key) for key in known} == known

    @pytest.mark.parametrize("name", NAMES)
    def test_windows_and_heads_of_published_models(self, name: str) -> None:
        from transformers import AutoConfig

        from spkv_nas.model import cache_layers, model_shape

        content = config(name)
        text = AutoConfig.for_model(content.pop("model_type"), **content).get_text_config()
        layers = read_model_cache(PUBLISHED / f"{name}.json").layers
        attention = [layer for layer in layers if layer.state is None]
        assert cache_layers.native_windows(text) == [layer.window for layer in attention]
        if name in ("mimo-v2-flash", "glm-4.7-flash", "gemma-4-e4b"):
            return  # not of one size, or latents: built below
        shape = model_shape.config_shape(text)
        assert {layer.num_heads for layer in attention} == {shape.num_kv_heads}
        assert {layer.key_dim for layer in attention} == {shape.head_dim}

    @pytest.mark.parametrize(
        ("family", "sizes"),
        [
            (
                "qwen3_next",
                {
                    "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4,
                    "num_experts": 2,
                    "num_experts_per_tok": 1,
                },
            ),
            ("granitemoehybrid", {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}),
            ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}),
            ("lfm2", {"layer_types": ["conv", "full_attention"]}),
            ("falcon", {"multi_query": True}),
            (
                "gemma4_text",
                {"global_head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]},
            ),
            (
                "deepseek_v3",
                {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "first_k_dense_replace": 2},
            ),
        ],
    )
    def test_a_tiny_model_keeps_as_many_numbers(self, family: str, sizes: dict[str, Any]) -> None:
        """transformers keeps one input more of a convolution."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

        shared = {
            "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 32, "sliding_window": 8,
        }  # fmt: skip
        if family in ("qwen3_next", "granitemoehybrid"):
            kinds = {"qwen3_next": "linear_attention", "granitemoehybrid": "mamba"}
            shared["layer_types"] = [kinds[family], "full_attention"]
        if family in ("deepseek_v3", "falcon"):
            del shared["head_dim"]
        if family == "deepseek_v3":
            shared["num_key_value_heads"] = 4
        model_config = AutoConfig.for_model(family, **{**shared, **sizes})
        model = AutoModelForCausalLM.from_config(model_config).eval()
        cache = DynamicCache(config=model_config)
        with torch.no_grad():
            model(input_ids=torch.arange(5)[None], past_key_values=cache)
        layers = config_cache({**model_config.to_dict(), "model_type": family}, "config").layers
        kept = [layer for layer in cache.layers if numbers(layer)]
        for layer, expected in zip(kept, layers, strict=True):
            assert numbers(layer) == numbers_of(expected, 5)


def numbers(layer: Any) -> int:
    """Return how many numbers a layer of a cache of transformers holds."""
    names = ("keys", "values", "conv_states", "recurrent_states")
    tensors = [getattr(layer, name, None) for name in names]
    flat = [
        one
        for tensor in tensors
        for one in (tensor.values() if isinstance(tensor, dict) else [tensor])
    ]
    return sum(tensor.numel() for tensor in flat if tensor is not None)


def numbers_of(layer: LayerCache, tokens: int) -> int:
    """Return how many numbers transformers keeps of what a layer keeps."""
    if layer.state is not None:
        inputs = layer.state.channels + layer.state.groups * layer.state.group_channels
        return layer.state.convolution + inputs + layer.state.recurrent
    return tokens * layer.token_numbers
