"""Model classes of vLLM whose attention has the windows of a layout, made when vLLM asks for one by its name."""

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spkv_nas.serving.vllm.attention import HeadwiseAttention, replace_attention
from spkv_nas.serving.vllm.config import (
    NATIVE,
    PREFIX,
    ServedLayer,
    architectures,
    layer_index,
    served_layers,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SINKS = ".learned_sinks.logits"  # end of the name of a layer's learned sinks in a checkpoint


def __getattr__(name: str) -> Any:
    """Make the model class ``name``, such as SPKVLlamaForCausalLM."""
    if name not in architectures():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = name.removeprefix(PREFIX)
    module = NATIVE.get(stock, "transformers")
    base = getattr(import_module(f"vllm.model_executor.models.{module}"), stock)
    model_class = _with_layout(name, base)
    globals()[name] = model_class
    return model_class


def _with_layout(class_name: str, base: Any) -> Any:
    """Return a subclass of a model class of vLLM that applies the layout in the config."""

    class Served(base):
        """Subclass of ``base`` with a layout."""

        def __init__(self, *, vllm_config: "VllmConfig", prefix: str = "") -> None:
            """Build the model, then replace its attention."""
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            replace_attention(self, vllm_config)
            self._spkv_layers = served_layers(vllm_config.model_config.hf_config.spkv)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
            """Load weights, learned sinks among them, and return the names of loaded parameters."""
            sinks: set[str] = set()
            loaded = super().load_weights(_without_sinks(self, self._spkv_layers, weights, sinks))
            return None if loaded is None else loaded | sinks

    Served.__name__ = class_name
    Served.__qualname__ = class_name
    Served.__module__ = __name__
    return Served


def _without_sinks(
    model: nn.Module,
    layers: Mapping[int, ServedLayer],
    weights: Iterable[tuple[str, Tensor]],
    loaded: set[str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights but learned sinks, which are loaded, and the names of their parameters added to ``loaded``."""
    # Find the attention that this rank serves
    attention = {
        layer_index(name): (name, module)
        for name, module in model.named_modules()
        if isinstance(module, HeadwiseAttention)
    }
    for name, tensor in weights:
        if not name.endswith(_SINKS):
            yield name, tensor
            continue
        index = layer_index(name)
        # With pipeline parallelism not every layer is here
        if index in attention:
            prefix, module = attention[index]
            for parameter in module.load_sinks(tensor, layers[index]):
                loaded.add(f"{prefix}.{parameter}")
