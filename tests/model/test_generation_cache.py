"""Test cache files, read as written or refused, since kernels follow their tables without a check; and masks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import gated, logits, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas import GateConfig, attach_gates
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.model import generation_cache
from spkv_nas.model.generation_cache import SPKVCache
from spkv_nas.model.modes import set_gate_mode
from spkv_nas.model.windows import apply_layout

Sizes, Tensors = dict[str, str], dict[str, Tensor]
Change = Callable[[Sizes, Tensors], None]


@pytest.fixture
def model() -> PreTrainedModel:
    model = gated()
    set_gate_mode(model, "hard")
    return model


@pytest.fixture
def file(model: PreTrainedModel, tmp_path: Path, tokens: Tensor) -> Path:
    """File of a cache with two sequences of 23 tokens."""
    cache = SPKVCache(model)
    model.generate(tokens[:, :12], past_key_values=cache, max_new_tokens=12, min_new_tokens=12, pad_token_id=0)
    cache.save(tmp_path / "cache.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]
    return tmp_path / "cache.safetensors"


def rewrite(file: Path, change: Change) -> None:
    """Change a file and its hash, as an attacker would."""
    with safe_open(file, "pt") as opened:
        sizes = dict(opened.metadata())
    tensors = load_file(file)
    del sizes["sha256"]
    change(sizes, tensors)
    described = {name: text for name, text in sizes.items() if name != "format"}
    sizes["sha256"] = generation_cache._digest(described, tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, file, sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sizes, _: sizes.pop("2"), "belongs to another model"),
        (lambda sizes, _: sizes.update({"1": "6 16 23"}), "is shorter than"),
        (lambda sizes, _: sizes.update({"1": "6 16 23 1000000000000 2 8 0"}), "ring_k: expected numbers"),
        (lambda sizes, _: sizes.update({"1": "6 16 1000000000000000000000 2 2 8 0"}), "page_size, tokens"),
        (lambda sizes, _: sizes.update({"1": "6 16 24 2 2 8 0"}), "hold different numbers of tokens"),
        (lambda sizes, _: sizes.update({"1": "6 8 23 2 2 8 0"}), "page_size, tokens"),
        (lambda _, x: x.pop("0.page_owner"), "page_owner: missing"),
        (lambda _, x: x.update({"0.pool_v": x["0.pool_v"][:-1]}), "pool_v: expected"),
        (lambda _, x: x.update({"0.ring_keep": x["0.ring_keep"].int()}), r"ring_keep: expected torch\.bool"),
        (lambda _, x: x["0.ring_v"].fill_(torch.nan), "ring_v: expected finite numbers"),
        (lambda _, x: x["0.lengths"].fill_(1 << 40), "lengths: expected at most"),
        (lambda _, x: x["0.lengths"].fill_(-1), "lengths: expected at most"),
        (lambda _, x: x["0.seq_lens"].fill_(-1), "lengths: expected at most"),
        (lambda _, x: x["0.seq_lens"].fill_(1 << 40), "page_size, tokens"),
        (lambda _, x: x["0.block_table"].fill_(1 << 40), "block_table: expected"),
        (lambda _, x: x["0.block_table"].fill_(-7), "block_table: expected"),
        (lambda _, x: x["0.page_owner"].fill_(3), "expected"),
        (lambda _, x: x["0.page_block"].fill_(3), "page_owner, page_block: expected"),
    ],
)
def test_damaged_tables(change: Change, message: str, model: PreTrainedModel, file: Path) -> None:
    rewrite(file, change)
    with pytest.raises(UserError, match=f"cache .*{message}"):
        SPKVCache.load(model, file)


def test_any_flipped_bit(model: PreTrainedModel, file: Path) -> None:
    """Bits in the padding of the header are exempt."""
    data, rng, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(60):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try:
            SPKVCache.load(model, file)
        except UserError:
            refused += 1
    assert refused >= 58


def test_of_another_layout(tmp_path: Path, tokens: Tensor) -> None:
    """The same number of global heads in every layer."""
    model, file = tiny_model(), tmp_path / "cache.safetensors"
    layout = Layout(("GL", "LL", "LG", "GG"), 6)
    apply_layout(model, layout)
    cache = SPKVCache(model)
    model.generate(tokens[:, :12], past_key_values=cache, max_new_tokens=2, min_new_tokens=2, pad_token_id=0)
    cache.save(file)
    assert SPKVCache.load(model, file).get_seq_length() == 13
    apply_layout(model, Layout(("GL", "LL", "GL", "GG"), 6))
    with pytest.raises(UserError, match="another layout: its heads in layer 2 are LG; this model has GL"):
        SPKVCache.load(model, file)


def test_of_another_model(model: PreTrainedModel, file: Path) -> None:
    other = tiny_model(num_key_value_heads=4)
    attach_gates(other, GateConfig(window=6))
    with pytest.raises(UserError, match="it has 2 KV heads, and the model 4"):
        SPKVCache.load(other, file)


def hybrid(family: str = "llama") -> PreTrainedModel:
    model = tiny_model(family)
    apply_layout(model, Layout(("GL", "LL", "GG", "LG"), 6))
    return model


class TestMask:
    """The cache compares each mask with the tokens that it has seen; it ignored all but the new columns."""

    @pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # one mask for all layers, and two
    def test_padding_that_stays(self, family: str, tmp_path: Path) -> None:
        """Rows equal those without padding, also after padding between two turns, and from a file."""
        model = hybrid(family)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 97, (2, 14), generator=generator)
        mask = torch.ones(2, 14, dtype=torch.bool)
        mask[0, :3] = mask[1, 6:8] = False
        cache = SPKVCache(model)
        with torch.no_grad():
            model(
                input_ids=ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache, position_ids=order(mask)[:, :8]
            )
            cache.save(tmp_path / "cache")
            for each in (cache, SPKVCache.load(model, tmp_path / "cache")):
                now = {"attention_mask": mask, "position_ids": order(mask)[:, 8:], "past_key_values": each}
                actual = model(input_ids=ids[:, 8:], **now).logits
                for row in range(2):
                    expected = logits(model, ids[row, mask[row]][None])[0, -6:]
                    assert torch.allclose(actual[row], expected, atol=1e-4 * float(expected.abs().max()))

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ([1] * 14, "differs from earlier calls"),  # padding that becomes visible
            (None, "attention_mask is missing"),
            ([0] * 3 + [1] + [0] * 3 + [1] * 7, "differs from earlier calls"),  # tokens that are hidden
            ([0] * 3 + [1] * 10, "has 13 columns for 8 cached and 6 new tokens"),
            ([1] * 6, "has 6 columns"),
        ],
    )
    def test_masks_that_change(self, columns: list[int] | None, message: str) -> None:
        model = hybrid()
        ids, mask, cache = torch.full((1, 14), 5), torch.tensor([[0] * 3 + [1] * 5]), SPKVCache(model)
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
            with pytest.raises(UserError, match="position_ids start again, but the cache holds 8 tokens"):
                model(input_ids=torch.full((1, 2), 5), position_ids=torch.arange(2)[None], past_key_values=cache)


def order(mask: Tensor) -> Tensor:
    """Return the positions of tokens that are not padding."""
    return (mask.cumsum(1) - 1).clamp(min=0)
