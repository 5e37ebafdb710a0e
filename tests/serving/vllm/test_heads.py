"""Test how the KV heads of a layer are divided among vLLM's attention layers."""

from __future__ import annotations

import pytest

from spkv_nas.engines.engine import ServedCache
from spkv_nas.engines.vllm import choose_unit, count_parts, plan_parts
from spkv_nas.serving.vllm.config import Part, Windows, parts

CACHE = ServedCache((6, 4), 32, "float32", window=32, context=8192, page_size=32, in_flight=256)


def windows(*rows: str) -> list[Windows]:
    """Windows of letters of heads."""
    return [tuple({"G": None, "L": 32, "M": 64}[head] for head in row) for row in rows]


def request_bytes(rows: list[Windows], unit: int) -> int:
    return plan_parts(CACHE, count_parts(rows, unit)).request_bytes


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
    assert choose_unit(CACHE, windows("GGGG", "LLLL", "LLLL")) == 0


def test_units_are_chosen_where_pages_of_pairs_do_not_divide() -> None:
    """Three heads beside four: a page of a pair is padded by a quarter."""
    assert choose_unit(CACHE, MIXED) == 1
    assert request_bytes(MIXED, 1) < request_bytes(MIXED, 0)


def test_pairs_are_chosen_where_units_cost_the_same() -> None:
    """Two global and two local heads in each layer: equal pages either way, and a unit has two heads."""
    rows = windows("GGLL", "LGGL", "LLGG")
    assert choose_unit(CACHE, rows) == 0


def test_units_have_the_greatest_common_divisor_of_heads() -> None:
    assert choose_unit(CACHE, windows("GGLLLL", "LLLLLL", "LLLLLL", "LLGGLL")) in (0, 2)
    assert choose_unit(CACHE, windows("GGGGLL", "LLLLLL", "LLLLLL", "LLLLLL")) == 2
    assert choose_unit(CACHE, windows("GGGGLL", "LLLLMM", "LLLLLL", "LLLLLL")) == 2


def test_the_way_with_fewer_bytes_is_chosen() -> None:
    """One global head of four in every layer: pairs give local parts of three heads, whose pages are the largest."""
    for rows in (windows("GLLL") * 6, windows("GGLL", "GLLL"), windows("GGGL") * 3, MIXED):
        unit = choose_unit(CACHE, rows)
        other = 1 - unit
        assert request_bytes(rows, unit) <= request_bytes(rows, other)
