"""Test the masks that a cache compares with the tokens that it has seen."""

from __future__ import annotations

import pytest
import torch
from helpers import logits, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.model.generation_cache import SPKVCache
from spkv_nas.model.windows import apply_layout


def hybrid(family: str = "llama") -> PreTrainedModel:
    model = tiny_model(family)
    apply_layout(model, Layout(("GL", "LL", "GG", "LG"), 6))
    return model


@pytest.mark.parametrize("legend", [{"L": 24}, {"L": 6, "M": 24, "N": 70}])
def test_bytes_are_those_of_the_plan(legend: dict[str, int]) -> None:
    """Several windows add no more to the plan than one: tables, unfinished pages, and 4 % spare ones."""
    rows = ("GLMN", "LLMM", "NGNL", "MLLG") if len(legend) > 1 else ("GLLL", "LLLL", "LGLL", "LLLG")
    model = tiny_model(num_key_value_heads=4, head_dim=64)
    layout = Layout(rows, windows=legend, sinks=1)
    apply_layout(model, layout)
    cache = SPKVCache(model, page_size=4)
    with torch.no_grad():
        for tokens in torch.full((1, 300), 5).split([280, *[1] * 20], 1):
            model(input_ids=tokens, past_key_values=cache)
    windows = [window for row in layout.head_windows for window in row]
    planned = CacheCost(300, 1, layout.window, head_dim=64, dtype="float32", sinks=1).of_heads(
        windows
    )
    assert planned < cache.num_bytes < 1.07 * planned


class TestMask:
    """The cache compares each mask with the tokens that it has seen; it ignored all but the new columns."""

    @pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # one mask for all layers, and two
    def test_padding_that_stays(self, family: str) -> None:
        """Rows equal those without padding, also after padding between two turns."""
        model = hybrid(family)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 97, (2, 14), generator=generator)
        mask = torch.ones(2, 14, dtype=torch.bool)
        mask[0, :3] = mask[1, 6:8] = False
        cache = SPKVCache(model)
        with torch.no_grad():
            model(
                input_ids=ids[:, :8],
                attention_mask=mask[:, :8],
                past_key_values=cache,
                position_ids=order(mask)[:, :8],
            )
            now = {
                "attention_mask": mask,
                "position_ids": order(mask)[:, 8:],
                "past_key_values": cache,
            }
            actual = model(input_ids=ids[:, 8:], **now).logits
        for row in range(2):
            expected = logits(model, ids[row, mask[row]][None])[0, -6:]
            assert torch.allclose(actual[row], expected, atol=1e-4 * float(expected.abs().max()))

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ([1] * 14, "differs from earlier calls"),  # padding that becomes visible
            (None, "attention_mask is missing"),
            (
                [0] * 3 + [1] + [0] * 3 + [1] * 7,
                "differs from earlier calls",
            ),  # tokens that are hidden
            ([0] * 3 + [1] * 10, "has 13 columns for 8 cached and 6 new tokens"),
            ([1] * 6, "has 6 columns"),
        ],
    )
    def test_masks_that_change(self, columns: list[int] | None, message: str) -> None:
        model = hybrid()
        ids = torch.full((1, 14), 5)
        mask = torch.tensor([[0] * 3 + [1] * 5])
        cache = SPKVCache(model)
        with torch.no_grad():
            model(input_ids=ids[:, :8], attention_mask=mask, past_key_values=cache)
            mask.zero_()  # which does not change what the cache has seen
            with pytest.raises(UserError, match=message):
                model(
                    input_ids=ids[:, 8:],
                    attention_mask=None if columns is None else torch.tensor([columns]),
                    past_key_values=cache,
                )

    def test_positions_that_start_again(self) -> None:
        model = hybrid()
        cache = SPKVCache(model)
        with torch.no_grad():
            model(input_ids=torch.full((1, 8), 5), past_key_values=cache)
            with pytest.raises(
                UserError, match="position_ids start again, but the cache holds 8 tokens"
            ):
                model(
                    input_ids=torch.full((1, 2), 5),
                    position_ids=torch.arange(2)[None],
                    past_key_values=cache,
                )


def order(mask: Tensor) -> Tensor:
    """Return the positions of tokens that are not padding."""
    return (mask.cumsum(1) - 1).clamp(min=0)
