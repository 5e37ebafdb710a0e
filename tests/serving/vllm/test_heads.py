"""Test how the KV heads of a layer are divided among vLLM's attention layers."""

from __future__ import annotations

import pytest

from spkv_nas.engines.cache import CacheSettings, LayerCache
from spkv_nas.engines.vllm import choose_unit, count_parts, plan_parts
from spkv_nas.serving.vllm.config import Part, Windows, parts

SETTINGS = CacheSettings(page_size=32, in_flight=256)
HEAD = LayerCache(num_heads=1, key_dim=32, value_dim=32)
CONTEXT = 8192


def windows(*rows: str) -> list[Windows]:
    """Windows of letters of heads."""
    return [tuple({"G": None, "L": 32, "M": 64}[head] for head in row) for row in rows]


def choose(rows: list[Windows]) -> int:
    """Return the heads of a unit that is chosen for rows of windows."""
    return choose_unit(count_parts(rows, 0, HEAD), SETTINGS, CONTEXT)


def request_bytes(rows: list[Windows], unit: int) -> int:
    return plan_parts(count_parts(rows, unit, HEAD), SETTINGS, CONTEXT).request_bytes


MIXED = windows("GLLL", "LLGL", "LLLL", "GLGL", "LLLL", "LGLL")


def test_heads_are_divided_by_kind() -> None:
    assert parts((None, 32, None, 32), 0) == [Part(None, (0, 2)), Part(32, (1, 3))]
    assert parts((32,) * 4, 0) == [Part(32, (0, 1, 2, 3))]
    assert parts((64, None, 32, 64), 0) == [Part(None, (1,)), Part(32, (2,)), Part(64, (0, 3))]


def test_heads_are_divided_into_units() -> None:
    assert parts((32, None, 32, 32), 1) == [
        Part(None, (1,)),
        Part(32, (0,)),
        Part(32, (2,)),
        Part(32, (3,)),
    ]
    assert parts((32,) * 4 + (None,) * 2, 2) == [
        Part(None, (4, 5)),
        Part(32, (0, 1)),
        Part(32, (2, 3)),
    ]


@pytest.mark.parametrize("unit", [0, 1])
def test_every_head_is_in_one_part(unit: int) -> None:
    for row in MIXED:
        divided = parts(row, unit)
        assert sorted(head for part in divided for head in part.heads) == [0, 1, 2, 3]
        assert all(row[head] == part.window for part in divided for head in part.heads)


def test_whole_layers_need_no_units() -> None:
    assert choose(windows("GGGG", "LLLL", "LLLL")) == 0


def test_units_are_chosen_where_pages_of_pairs_do_not_divide() -> None:
    """Three heads beside four: a page of a pair is padded by a quarter."""
    assert choose(MIXED) == 1
    assert request_bytes(MIXED, 1) < request_bytes(MIXED, 0)


def test_pairs_are_chosen_where_units_cost_the_same() -> None:
    """Two global and two local heads in each layer: equal pages either way, and a unit has two heads."""
    rows = windows("GGLL", "LGGL", "LLGG")
    assert choose(rows) == 0


def test_units_have_the_greatest_common_divisor_of_heads() -> None:
    assert choose(windows("GGLLLL", "LLLLLL", "LLLLLL", "LLGGLL")) in (0, 2)
    assert choose(windows("GGGGLL", "LLLLLL", "LLLLLL", "LLLLLL")) == 2
    assert choose(windows("GGGGLL", "LLLLMM", "LLLLLL", "LLLLLL")) == 2


def test_the_way_with_fewer_bytes_is_chosen() -> None:
    """One global head of four in every layer: pairs give local parts of three heads, whose pages are the largest."""
    for rows in (windows("GLLL") * 6, windows("GGLL", "GLLL"), windows("GGGL") * 3, MIXED):
        unit = choose(rows)
        other = 1 - unit
        assert request_bytes(rows, unit) <= request_bytes(rows, other)
