"""State what inference engines do with the folders that ``export`` writes: one table, which the command prints.

A cell says what an engine did with a form, such as ``ministral`` or ``spkv``: tiny random models with layouts of whole
layers (per head for ``spkv``), 64 greedy tokens and the log-probabilities of a prompt of 200 tokens against this
package's model. A cell that was only read in the engine's source says so, and what was neither run nor read is not
tried. ``docs/support-matrix.md`` shows the same table.

Some engines ignore ``layer_types`` and would run a form dense without an error. ``guards`` returns keys of the config
that only such an engine reads, and on which its loader fails. None is known for SGLang, which was read and not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spkv_nas.base.errors import UserError


class Outcome(Enum):
    """Name what an engine does with a form."""

    EXACT = "exact"
    REFUSED = "refused"
    DENSE = "dense"
    DIFFERENT = "different"
    UNTRIED = "not tried"


@dataclass(frozen=True)
class Cell:
    """State what one engine does with one form.

    Attributes:
        outcome: exact: it computes the hybrid; refused: it stops with an error; dense, different: it computes something
            else without an error.
        note: what that takes, such as an option of the engine.
        is_read: whether it was read in the engine's source, and not run.
    """

    outcome: Outcome
    note: str = ""
    is_read: bool = False

    def __str__(self) -> str:
        """Return the outcome and its notes, such as "exact (with --model-impl transformers)"."""
        notes = [note for note in (self.note, "read, not run" if self.is_read else "") if note]
        return f"{self.outcome.value} ({'; '.join(notes)})" if notes else self.outcome.value


@dataclass(frozen=True)
class Engine:
    """Inference engine in the version that was tried.

    Attributes:
        name: value of ``export --for``.
        title: name and version.
    """

    name: str
    title: str


_EXACT, _REFUSED, _UNTRIED = Cell(Outcome.EXACT), Cell(Outcome.REFUSED), Cell(Outcome.UNTRIED)
_QWEN_VLLM = Cell(Outcome.EXACT, "with --model-impl transformers; refused without")
_UNGUARDED = Cell(Outcome.EXACT, "run without the keys lm_config and model_file")
_PLUGIN = Cell(Outcome.EXACT, "with spkv-nas in its environment; refused otherwise")
_IMPORTED = Cell(Outcome.REFUSED, "exact after import spkv_nas")
_ONE_MORE = Cell(Outcome.DIFFERENT, "one key more than the window; exact with --model-impl transformers")
_SQUARE = Cell(Outcome.EXACT, "refused where head_dim is not hidden_size / num_attention_heads")
_DENSE_AS_READ, _REFUSED_AS_READ = Cell(Outcome.DENSE, is_read=True), Cell(Outcome.REFUSED, is_read=True)
_ONE_MORE_AS_READ = Cell(Outcome.DIFFERENT, "one key more than the window", is_read=True)
_ALL_KEYS = Cell(Outcome.EXACT, "without saving memory: its cache keeps all keys")
_ROUNDED = Cell(Outcome.EXACT, "tokens equal, log-probabilities within 4e-4")

ENGINES = (
    Engine("vllm", "vLLM 0.32.0"),
    Engine("transformers", "transformers 5.23.0"),
    Engine("continuous-batching", "transformers 5.23.0 continuous batching"),
    Engine("mlx", "mlx-lm 0.32.2"),
    Engine("llamacpp", "llama.cpp (llama-cpp-python 0.3.36)"),
    Engine("openvino", "OpenVINO GenAI 2026.4.1"),
    Engine("onnxruntime", "ONNX Runtime GenAI 0.18"),
    Engine("sglang", "SGLang 0.5.23"),
)

# One row per form, with a cell per engine in the order of ENGINES. Each export is compared with plain transformers.
_ROWS: dict[str, tuple[Cell, ...]] = {
    "ministral": (_EXACT, _EXACT, _EXACT, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _ONE_MORE_AS_READ),
    "qwen2": (_QWEN_VLLM, _EXACT, _EXACT, _REFUSED, _REFUSED, _UNGUARDED, _UNGUARDED, _DENSE_AS_READ),
    "qwen3": (_QWEN_VLLM, _EXACT, _EXACT, _REFUSED, _REFUSED, _UNGUARDED, _UNGUARDED, _DENSE_AS_READ),
    "gemma3_text": (_EXACT, _EXACT, _UNTRIED, _ROUNDED, _EXACT, _REFUSED, _REFUSED, _UNTRIED),
    "gemma3_text with other layers": (_EXACT, _EXACT, _EXACT, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
    "olmo3": (_EXACT, _EXACT, _EXACT, _EXACT, _EXACT, _REFUSED, _REFUSED, _UNTRIED),
    "smollm3": (_EXACT, _EXACT, _UNTRIED, _ALL_KEYS, _REFUSED, _UNTRIED, _UNTRIED, _UNTRIED),
    "cohere2": (_ONE_MORE, _EXACT, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED),
    "cohere2 with other layers": (_ONE_MORE, _EXACT, _UNTRIED, _REFUSED, _REFUSED, _UNTRIED, _UNTRIED, _UNTRIED),
    "exaone4": (_EXACT, _EXACT, _UNTRIED, _REFUSED, _REFUSED, _UNTRIED, _UNTRIED, _UNTRIED),
    "gpt_oss": (_UNTRIED, _EXACT, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED, _UNTRIED),
    "gpt_oss with other layers": (_UNTRIED, _EXACT, _UNTRIED, _UNTRIED, _REFUSED_AS_READ, _UNTRIED, _UNTRIED, _UNTRIED),
    "granite_swa": (_EXACT, _EXACT, _UNTRIED, _REFUSED, _SQUARE, _UNTRIED, _UNTRIED, _UNTRIED),
    "spkv": (_PLUGIN, _IMPORTED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
    "spkv with a sink token": (_PLUGIN, _IMPORTED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
    "spkv with several sink tokens": (_REFUSED, _IMPORTED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
    "spkv with both kinds of sinks": (_REFUSED, _IMPORTED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _REFUSED, _UNTRIED),
}

# Forms of families that have a window in all but every n-th layer, by n; engines that ignore layer_types assume it
_PERIODS = {"gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
_OTHER_LAYERS = " with other layers"
_GUARDED = {
    "mlx": ("qwen2", "qwen3", f"gemma3_text{_OTHER_LAYERS}", f"cohere2{_OTHER_LAYERS}"),
    "llamacpp": ("qwen2", "qwen3", "smollm3", "exaone4", *(f"{kind}{_OTHER_LAYERS}" for kind in _PERIODS)),
}
GUARD_KEYS = ("model_file", "lm_config")


def form_name(model_type: str, layer_types: Sequence[str]) -> str:
    """Return the form of a native architecture: its model type, and whether its layers are not those of its family."""
    period = _PERIODS.get(model_type)
    is_stock = period is None or all(
        (kind == "full_attention") == ((layer + 1) % period == 0) for layer, kind in enumerate(layer_types)
    )
    return model_type if is_stock else f"{model_type}{_OTHER_LAYERS}"


def guards(form: str) -> dict[str, Any]:
    """Return keys of ``config.json`` that stop the loaders of engines which would ignore the windows of a form.

    mlx-lm imports the module that ``model_file`` names, if that is allowed. llama.cpp's converter takes the
    architecture from ``lm_config``.
    """
    reason = f"layer_types of {form.partition(' ')[0]} are ignored by"
    keys: dict[str, Any] = {}
    if form in _GUARDED["mlx"]:
        keys[GUARD_KEYS[0]] = f"{reason} mlx-lm"
    if form in _GUARDED["llamacpp"]:
        keys[GUARD_KEYS[1]] = {"architectures": [f"{reason} llama.cpp"]}
    return keys


def cells(form: str) -> dict[Engine, Cell]:
    """Return what each engine does with a form; not tried for a form without a row, such as a package's."""
    row = _ROWS.get(form, (_UNTRIED,) * len(ENGINES))
    return dict(zip(ENGINES, row, strict=True))


def outcomes(form: str) -> dict[str, str]:
    """Return what each engine does with a form, such as "exact" or "refused", by name and version."""
    return {engine.title: str(cell) for engine, cell in cells(form).items()}


def check_engine_name(name: str | None) -> None:
    """Raise ``UserError`` if an engine is named that the table does not have."""
    names = [engine.name for engine in ENGINES]
    if name is not None and name not in names:
        raise UserError(f"unknown engine '{name}'; expected one of {', '.join(names)}")


def objection(form: str, name: str) -> str | None:
    """Return why a form is not for the engine of that name, as a clause; None if the engine computes the hybrid."""
    engine, cell = next((engine, cell) for engine, cell in cells(form).items() if engine.name == name)
    if cell.outcome is Outcome.EXACT:
        return None
    verbs = {
        Outcome.REFUSED: "refuses",
        Outcome.DENSE: "runs, dense and without an error,",
        Outcome.DIFFERENT: "computes, without an error, something else with",
        Outcome.UNTRIED: "was not tried with",
    }
    return f"{engine.title} {verbs[cell.outcome]} the form {form}"
