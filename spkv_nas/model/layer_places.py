"""Check that the attention layers of a model are numbered as they are placed, and as its config says.

A layer finds its part of a cache by its ``layer_idx``, and rows of a layout and of head scores are counted by place.
Both differ once layers were removed, repeated or reordered in Python.
"""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError

_RENUMBER = (
    "number the layers by their places: "
    "for i, layer in enumerate(model.model.layers): layer.self_attn.layer_idx = i"
)
# Kinds in a config's layer_types
_FULL = "full_attention"
_SLIDING = "sliding_attention"


def check_order(model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Raise ``UserError`` unless attention ``layers`` run in the order in which the model holds them."""
    places = {module: place for place, module in enumerate(model.modules())}
    order = [places[layer] for layer in layers]
    if order != sorted(order):
        raise UserError(
            f"{type(model).__name__} runs its attention layers in another order than it holds "
            "them, so that rows of a layout would be ambiguous\n"
            "put them into their list in the order in which they run"
        )


def check_numbers(
    model: PreTrainedModel, layers: Sequence[nn.Module], indices: Sequence[int]
) -> None:
    """Raise ``UserError`` unless attention layers, in their order, have the numbers of their parts of a cache.

    ``indices`` are these numbers. Layers without a number, or that are told it in each call (-1), are not checked.
    """
    for layer, index in zip(layers, indices, strict=True):
        number = getattr(layer, "layer_idx", None)
        if isinstance(number, int) and number not in (index, -1):
            raise UserError(
                f"{type(model).__name__}: the layer at place {index} has layer_idx {number}, "
                "as where layers were removed, repeated or reordered, "
                "and would use the cache of another one\n"
                f"{_RENUMBER}"
            )


def check_kinds(
    model: PreTrainedModel, windows: Sequence[int | None], indices: Sequence[int]
) -> None:
    """Raise ``UserError`` unless attention layers have sliding ``windows`` where the config's ``layer_types`` say so.

    ``indices`` are the layers' places in the config.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if kinds is None:
        return
    for window, index in zip(windows, indices, strict=True):
        found = _FULL if window is None else _SLIDING
        if kinds[index] in (_FULL, _SLIDING) and kinds[index] != found:
            raise UserError(
                f"{type(model).__name__}: the layer at place {index} computes {found}, "
                f"but its config's layer_types say {kinds[index]}, "
                "as where layers were removed or reordered\n"
                "give model.config the layer_types of the layers that are left"
            )


def own_config(model: PreTrainedModel) -> str | None:
    """Return which attention layer has a config of its own with another attention function; None if none has."""
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if (
            hasattr(module, "layer_idx")
            and getattr(config, "_attn_implementation", "spkv") != "spkv"
        ):
            return (
                f"{name} has a config of its own, as a copy of a layer has (copy.deepcopy), "
                "so that it does not follow the model's\n"
                f"give it the model's: model.get_submodule({name!r}).config = model.config"
            )
    return None


def miscounted(model: PreTrainedModel, layers: Sequence[nn.Module]) -> str | None:
    """Return how many layers the list that holds attention ``layers`` has, if the config says another number.

    None if both agree, or where layers are in several lists, or have several attentions each, as in LongCat.
    """
    # Find the list, and which of its entries hold the layers
    names = {module: name for name, module in model.named_modules()}
    entries = {_entry_name(model, names[layer]) for layer in layers}
    lists = {None if entry is None else entry.rpartition(".")[0] for entry in entries}
    configured = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    (list_name,) = lists if len(lists) == 1 else (None,)
    if list_name is None or len(entries) < len(layers) or not isinstance(configured, int):
        return None
    # Compare its length with the config
    stack = model.get_submodule(list_name)
    assert isinstance(stack, nn.ModuleList)
    if len(stack) == configured:
        return None
    return (
        f"it has {len(stack)} layers, but its config says num_hidden_layers: {configured}, "
        "as where layers were removed or added\n"
        f"set model.config.num_hidden_layers = {len(stack)}, and its layer_types, if it has them"
    )


def _entry_name(model: nn.Module, name: str) -> str | None:
    """Return the name of the module in the outermost list that holds a module; None if there is no list."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return ".".join(parts[: end + 1])
    return None
