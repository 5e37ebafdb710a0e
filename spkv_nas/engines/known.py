"""Describe the engines besides vLLM: what they do with exports, and what their caches take.

Those that allocate a buffer for every layer of every request are planned layer by layer; where that is only read in
their source, ``evidence`` says so, with the version.
"""

from abc import abstractmethod
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from spkv_nas.engines.cache import (
    CachePlan,
    CacheSettings,
    LayerCache,
    ModelCache,
    Row,
    round_up,
    sizes_of,
)
from spkv_nas.engines.engine import Engine, PlannedEngine, Program
from spkv_nas.engines.forms import (
    EXACT,
    NATIVE_FORMS,
    OTHER_LAYERS,
    PERIODS,
    REFUSED,
    SPKV_FORMS,
    UNTRIED,
)
from spkv_nas.engines.outcome import Cell, Outcome
from spkv_nas.engines.settings import BASES, SCALED, tried_with

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Transformers(Engine):
    """Plain transformers, which defines what a form computes."""

    name = "transformers"
    title = "transformers 5.23.0"
    outcomes: ClassVar = {
        **dict.fromkeys(NATIVE_FORMS, EXACT),
        **dict.fromkeys(
            SPKV_FORMS,
            Cell(
                Outcome.EXACT,
                "with trust_remote_code=True, without saving memory; refused otherwise",
            ),
        ),
    }
    program = Program("run_transformers.py", "transformers", registers_type=True)

    def cell(self, form: str, config: "PreTrainedConfig") -> Cell:
        """Return what it does with a form, whatever the settings: every export is compared with it."""
        return self.outcomes.get(form, UNTRIED)


class ContinuousBatching(Engine):
    """transformers with continuous batching."""

    name = "continuous-batching"
    title = "transformers 5.23.0 continuous batching"
    outcomes: ClassVar = {
        **dict.fromkeys(
            ("ministral", "qwen2", "qwen3", f"gemma3_text{OTHER_LAYERS}", "olmo3"), EXACT
        ),
        **dict.fromkeys(SPKV_FORMS, REFUSED),
    }
    tried: ClassVar = {
        "ministral": tried_with(),
        "qwen2": tried_with(),
        "qwen3": tried_with(),
        "gemma3_text": tried_with(),
        "olmo3": tried_with(rope_theta=(10_000.0,)),
    }


class BufferEngine(PlannedEngine):
    """Engine that gives every request a buffer in every layer."""

    def _plan(self, model: ModelCache, settings: CacheSettings, context: int) -> CachePlan:
        """Add up the buffers of all layers."""
        item_bytes = settings.item_bytes(model.dtype, self.sizes)
        activation_bytes = int(sizes_of()[model.dtype])
        rows = []
        for layer, count in model.parts.items():
            if layer.state is None:
                tokens = self._tokens(layer, settings, context)
                size = int(tokens * layer.token_numbers * item_bytes)
            else:
                size = self._state_bytes(layer, activation_bytes)
            rows.append(Row(layer, count, count * size))
        return CachePlan(sum(row.request_bytes for row in rows), 1, tuple(rows))

    @abstractmethod
    def _tokens(self, layer: LayerCache, settings: CacheSettings, context: int) -> int:
        """Return the tokens in a layer's buffer."""

    def _state_bytes(self, layer: LayerCache, activation_bytes: int) -> int:
        """Return the bytes of a layer's state: the recurrent one in float32."""
        assert layer.state is not None  # by the caller
        return layer.state.convolution * activation_bytes + 4 * layer.state.recurrent


class Mlx(BufferEngine):
    """mlx-lm, which reads ``layer_types`` in few of its classes, and imports the module that ``model_file`` names."""

    name = "mlx"
    title = "mlx-lm 0.32.2"
    outcomes: ClassVar = {
        "ministral": REFUSED,
        "qwen2": REFUSED,
        "qwen3": REFUSED,
        f"gemma3_text{OTHER_LAYERS}": REFUSED,
        f"cohere2{OTHER_LAYERS}": REFUSED,
        "exaone4": REFUSED,
        "granite_swa": REFUSED,
        **dict.fromkeys(SPKV_FORMS, REFUSED),
        "gemma3_text": Cell(Outcome.EXACT, "tokens equal, log-probabilities within 4e-4"),
        "olmo3": EXACT,
        "smollm3": Cell(Outcome.EXACT, "without saving memory: its cache keeps all keys"),
    }
    tried: ClassVar = {
        "smollm3": tried_with(
            "rope_theta",
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "no_rope_layers",
            rope_type=SCALED,
        ),
        "olmo3": tried_with(
            "rope_theta", "tie_word_embeddings", "attention_bias", rope_type=("yarn",)
        ),
        "gemma3_text": tried_with(
            *BASES, "query_pre_attn_scalar", "tie_word_embeddings", rope_type=SCALED
        ),
    }
    ignores_windows = ("qwen2", "qwen3", f"gemma3_text{OTHER_LAYERS}", f"cohere2{OTHER_LAYERS}")
    guard_key = "model_file"
    program = Program("run_mlx.py", "mlx_lm")
    evidence = "read in mlx-lm's source (models/cache.py at d78bf58), not run"
    note = "while tokens are generated; a chunk of the prompt, 2,048 tokens, takes more in layers with a window"
    uncounted = ("--kv-bits", "the prompt cache of mlx_lm.server", "padding of batches")
    defaults = CacheSettings(page_size=256, in_flight=0)
    settings = ()
    max_windows = 3
    window_families = frozenset(
        (
            *("gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "mimo_v2_flash", "cohere2"),
            *("olmo3", "exaone4", "llama", "ministral3"),
        )
    )

    def _tokens(self, layer: LayerCache, settings: CacheSettings, context: int) -> int:
        """Grow by 256 tokens up to the window, in which a ``RotatingKVCache`` writes over the oldest."""
        tokens = round_up(context, settings.page_size)
        return tokens if layer.window is None else min(tokens, layer.window)


class LlamaCpp(BufferEngine):
    """llama.cpp, whose converter takes the architecture from ``lm_config``."""

    name = "llamacpp"
    title = "llama.cpp"
    run_in = "llama-cpp-python 0.3.36"
    outcomes: ClassVar = {
        "ministral": REFUSED,
        "qwen2": REFUSED,
        "qwen3": REFUSED,
        f"gemma3_text{OTHER_LAYERS}": REFUSED,
        "smollm3": REFUSED,
        f"cohere2{OTHER_LAYERS}": REFUSED,
        "exaone4": REFUSED,
        **dict.fromkeys(SPKV_FORMS, REFUSED),
        "gemma3_text": EXACT,
        "olmo3": EXACT,
        f"gpt_oss{OTHER_LAYERS}": Cell(Outcome.REFUSED, is_read=True),
        "granite_swa": Cell(
            Outcome.EXACT, "refused where head_dim is not hidden_size / num_attention_heads"
        ),
    }
    tried: ClassVar = {
        "gemma3_text": tried_with(),
        "olmo3": tried_with(rope_theta=(10_000.0,)),
        "granite_swa": tried_with("attention_multiplier", "tie_word_embeddings"),
    }
    ignores_windows = (
        "qwen2",
        "qwen3",
        "smollm3",
        "exaone4",
        *(f"{kind}{OTHER_LAYERS}" for kind in PERIODS),
    )
    guard_key = "lm_config"
    program = Program("run_llamacpp.py", "llama_cpp", converts=True)
    evidence = "read in llama.cpp's source (src/llama-kv-cache*.cpp of llama-cpp-python 0.3.36)"
    note = "requests in caches of their own (--no-kv-unified), flash attention, states in float32"
    uncounted = ("compute buffers", "checkpoints of the cache (--ctx-checkpoints)", "draft models")
    # Cells are padded to 256; in flight: --ubatch-size
    defaults = CacheSettings(page_size=256, in_flight=512, kv_dtype="float16")
    settings = ("in-flight-tokens", "windows")
    # Blocks of 32 numbers of ggml: a scale of 2 bytes, for some a minimum of 2 more, and 4, 5 or 8 bits a number
    sizes: ClassVar = {
        **sizes_of(("float32", "float16", "bfloat16")),
        "q8_0": Fraction(34, 32),
        "q5_1": Fraction(24, 32),
        "q5_0": Fraction(22, 32),
        "q4_1": Fraction(20, 32),
        "q4_0": Fraction(18, 32),
        "iq4_nl": Fraction(18, 32),
    }
    window_families = frozenset(
        (
            *("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "mimo_v2_flash"),
            *("cohere2", "olmo3", "exaone4", "granite_swa"),
        )
    )

    def _tokens(self, layer: LayerCache, settings: CacheSettings, context: int) -> int:
        """Keep the window and a batch of the prompt in layers with a window."""
        cells = round_up(context, settings.page_size)
        if layer.window is None:
            return cells
        return round_up(min(cells, layer.window + settings.in_flight), settings.page_size)

    def _state_bytes(self, layer: LayerCache, activation_bytes: int) -> int:
        """Return the bytes of a layer's state, all in float32."""
        return super()._state_bytes(layer, 4)

    def guard(self, reason: str) -> dict[str, list[str]]:
        """Return an architecture that the converter does not know."""
        return {"architectures": [reason]}


class OpenVino(Engine):
    """OpenVINO GenAI."""

    name = "openvino"
    title = "OpenVINO GenAI 2026.4.1"
    outcomes: ClassVar = {
        **dict.fromkeys(
            ("ministral", "gemma3_text", f"gemma3_text{OTHER_LAYERS}", "olmo3", *SPKV_FORMS),
            REFUSED,
        ),
        **dict.fromkeys(
            ("qwen2", "qwen3"), Cell(Outcome.EXACT, "run without the keys lm_config and model_file")
        ),
    }
    tried: ClassVar = {"qwen2": tried_with(), "qwen3": tried_with()}


class OnnxRuntime(BufferEngine, OpenVino):
    """ONNX Runtime GenAI, for which the same forms were run as for OpenVINO with the same outcomes."""

    name = "onnxruntime"
    title = "ONNX Runtime GenAI 0.18"
    evidence = "read in its source (src/models/kv_cache.cpp at a0c04eb), not run"
    note = "on the CPU, with past_present_share_buffer and max_length the context"
    uncounted = ("beams", "the paged cache", "quantised caches")
    # In flight: 16 tokens more than the window on the CPU
    defaults = CacheSettings(page_size=1, in_flight=16)
    settings = ("in-flight-tokens",)
    # Whose layers with a window its model builder names, or all of whose layers have one
    window_families = frozenset(("gemma2", "gemma3_text", "gpt_oss", "mistral", "phi3"))

    def _tokens(self, layer: LayerCache, settings: CacheSettings, context: int) -> int:
        """Keep the window and some tokens more, so that not every token moves the cache."""
        return context if layer.window is None else min(context, layer.window + settings.in_flight)

    def _state_bytes(self, layer: LayerCache, activation_bytes: int) -> int:
        """Return the bytes of a layer's state in the type of activations; of LFM2 it has one input more."""
        assert layer.state is not None  # by the caller
        state = layer.state
        if not state.recurrent:
            state = replace(state, taps=state.taps + 1)
        return (state.convolution + state.recurrent) * activation_bytes


class Sglang(PlannedEngine):
    """SGLang, whose source was read. No key is known that would stop it."""

    name = "sglang"
    title = "SGLang 0.5.23"
    outcomes: ClassVar = {
        "ministral": Cell(Outcome.DIFFERENT, "one key more than the window", is_read=True),
        **dict.fromkeys(("qwen2", "qwen3"), Cell(Outcome.DENSE, is_read=True)),
    }
    evidence = "read in its source (model_executor/pool_configurator.py), not run"
    note = (
        "with a pool for layers with a window of --swa-full-tokens-ratio 0.8, "
        "one for states of --mamba-full-memory-ratio 0.9, three states a request"
    )
    uncounted = ("pipeline and data parallelism", "speculative decoding", "the host's cache")
    # In flight: SGLANG_SWA_EVICTION_INTERVAL
    defaults = CacheSettings(page_size=1, in_flight=128)
    settings = ("page-size", "tensor-parallel", "windows")
    window_families = frozenset(("gpt_oss", "granite_swa", "mimo_v2_flash", "gemma4_text"))
    # Tokens in the pool of layers with a window, for each in that of the others
    _window_ratio = Fraction(4, 5)
    # Memory of states, for each byte of keys and values
    _state_ratio = Fraction(9, 10)
    _states = 3  # of a request, with a radix cache

    def _plan(self, model: ModelCache, settings: CacheSettings, context: int) -> CachePlan:
        """Plan the pools, whose sizes are in fixed ratios, so that the scarcest one decides."""
        sizes = self._needed(model, settings, context)
        pools = {
            is_state: sum(
                size for layer, size in sizes.items() if (layer.state is not None) == is_state
            )
            for is_state in (False, True)
        }
        # Enlarge the pool of keys or that of states
        shared = max(pools[False], pools[True] / self._state_ratio)
        planned = {False: shared, True: shared * self._state_ratio}
        rows = []
        for layer, size in sizes.items():
            is_state = layer.state is not None
            num_bytes = size if not pools[True] else size / pools[is_state] * planned[is_state]
            rows.append(Row(layer, model.parts[layer], int(num_bytes)))
        return CachePlan(sum(row.request_bytes for row in rows), 1, tuple(rows))

    def _needed(
        self, model: ModelCache, settings: CacheSettings, context: int
    ) -> dict[LayerCache, Fraction]:
        """Return the bytes that a request takes in layers that keep the same."""
        item_bytes = settings.item_bytes(model.dtype, self.sizes)
        activation_bytes = int(sizes_of()[model.dtype])
        tokens = round_up(context, settings.page_size)
        # Tokens in the pools of layers without and with a window
        windows = [layer.window for layer in model.layers if layer.window is not None]
        kept = min(tokens, max(windows, default=0) + settings.in_flight + settings.page_size)
        has_global = any(layer.state is None and layer.window is None for layer in model.layers)
        all_tokens = (
            max(Fraction(tokens), kept / self._window_ratio) if windows else Fraction(tokens)
        )
        recent_tokens = all_tokens * self._window_ratio if has_global else Fraction(kept)
        sizes = {}
        for layer, count in model.parts.items():
            if layer.state is not None:
                state = layer.state
                size = Fraction(state.convolution * activation_bytes)
                size += state.recurrent * (2 if state.dtype == "bfloat16" else 4)
                sizes[layer] = count * size * self._states
                continue
            pool = all_tokens if layer.window is None else recent_tokens
            sizes[layer] = count * pool * layer.token_numbers * item_bytes
        return sizes
