"""Describe the engines whose cache is not planned, by what they do with exports."""

from typing import TYPE_CHECKING, ClassVar

from spkv_nas.engines.engine import Engine, Program
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


class Mlx(Engine):
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


class LlamaCpp(Engine):
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


class OnnxRuntime(OpenVino):
    """ONNX Runtime GenAI, for which the same forms were run with the same outcomes."""

    name = "onnxruntime"
    title = "ONNX Runtime GenAI 0.18"


class Sglang(Engine):
    """SGLang, whose source was read. No key is known that would stop it."""

    name = "sglang"
    title = "SGLang 0.5.23"
    outcomes: ClassVar = {
        "ministral": Cell(Outcome.DIFFERENT, "one key more than the window", is_read=True),
        **dict.fromkeys(("qwen2", "qwen3"), Cell(Outcome.DENSE, is_read=True)),
    }
