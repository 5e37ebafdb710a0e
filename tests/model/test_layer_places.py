"""Test models whose layers were removed, repeated or reordered: right with and without a cache, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import check_generation, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas import SPKVCache
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.model.windows import apply_layout


def with_layers(
    places: Sequence[int], *, renumber: bool = False, family: str = "llama", **options: Any
) -> Any:
    """Return a model with these of its layers, copied where one is repeated."""
    model = tiny_model(family, vocab_size=300, **options)
    model.generation_config.eos_token_id = None
    layers: list[torch.nn.Module] = []
    for place in places:
        layer = model.model.layers[place]
        if layer in layers:
            layer = copy.deepcopy(layer)
            layer.self_attn.config = model.config
        layers.append(layer)
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    if renumber:
        for index, layer in enumerate(layers):
            layer.self_attn.layer_idx = index  # type: ignore[union-attr]
    return model


def apply(model: PreTrainedModel) -> None:
    apply_layout(
        model, Layout(("GL", "LL", "LG", "GL")[: model.config.num_hidden_layers], 5, sinks=1)
    )


@pytest.mark.parametrize("places", [(0, 2), (0, 1, 3), (3, 0, 1), (0, 1, 1, 2)])
def test_renumbered_layers_are_right(places: Sequence[int]) -> None:
    model = with_layers(places, renumber=True)
    apply(model)
    check_generation(model)


@pytest.mark.parametrize(
    ("places", "place"), [((0, 2), 1), ((1, 2), 0), ((3, 0, 1), 0), ((0, 1, 1, 2), 2)], ids=str
)
def test_layers_with_the_numbers_of_others_are_refused(places: Sequence[int], place: int) -> None:
    """Their keys would be those of another layer in a cache."""
    model = with_layers(places)
    expected = rf"the layer at place {place} has layer_idx {places[place]}, .*\nnumber the layers by their places"
    with pytest.raises(UserError, match=expected):
        apply(model)


def test_layers_removed_from_a_hybrid_are_refused_by_the_cache(tokens: Tensor) -> None:
    model = tiny_model()
    apply(model)
    del model.model.layers[1]
    model.config.num_hidden_layers = 3
    with pytest.raises(UserError, match="the layer at place 1 has layer_idx 2"):
        SPKVCache(model)


@pytest.mark.parametrize("number", [3, 5])
def test_a_config_with_another_number_of_layers_is_refused(number: int) -> None:
    """With fewer, transformers would leave the others out, and a saved folder could not be loaded."""
    model = tiny_model()
    model.config.num_hidden_layers = number
    with pytest.raises(
        UserError, match=rf"it has 4 layers, but its config says num_hidden_layers: {number}"
    ):
        apply_layout(model, Layout(("GL",) * number, 5))


def test_one_layer_at_two_places_is_refused() -> None:
    model = tiny_model()
    model.model.layers[2] = model.model.layers[1]
    with pytest.raises(UserError, match="a layer that is repeated"):
        apply(model)


def test_a_copied_layer_with_a_config_of_its_own_is_refused() -> None:
    """Its attention function would stay the one before."""
    model = with_layers((0, 1, 2, 3))
    model.model.layers[2] = copy.deepcopy(model.model.layers[2])
    with pytest.raises(UserError, match=r"model\.layers\.2\.self_attn has a config of its own"):
        apply(model)


def test_layer_types_of_other_layers_are_refused() -> None:
    """As where the config's list was cut at its end, but other layers were removed."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = with_layers((1, 2), renumber=True, family="gemma3_text", layer_types=kinds)
    model.config.layer_types = kinds[:2]
    with pytest.raises(
        UserError, match="place 0 computes full_attention, but its config's layer_types say sliding"
    ):
        apply(model)
    model.config.layer_types = kinds[1:3]
    apply(model)
