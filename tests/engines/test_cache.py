"""Test the memory that serving engines plan: rules of vLLM's allocator, budgets that cost no more, and vLLM itself."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from vllm_server import PYTHON, needs_vllm

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cost.cache_cost import EngineCost
from spkv_nas.engines.engine import ServedCache, Serving
from spkv_nas.engines.vllm import VLLM, Part, count_parts, plan_parts

GIB = 2**30

# 21 layers of 128 bytes a token, as served on a CPU: pages of 128 tokens, chunks of 2,048
LAYERS = ServedCache(
    (21, 1), 64, "bfloat16", window=128, context=32768, page_size=128, in_flight=2048
)
# 10 requests
COST = EngineCost(
    32768, 10, 128, 64, "bfloat16", serving=Serving(VLLM, page_size=128, in_flight=2048)
)
GRIDS = ((21, 3), (32, 8), (36, 8))


class TestVllm:
    @pytest.mark.parametrize(
        ("num_global", "tokens"),
        [
            (7, 2_101_191),
            (8, 1_838_599),
            (9, 1_306_175),
            (12, 1_306_175),
            (13, 1_012_963),
            (21, 798_848),
        ],
    )
    def test_reports_of_a_running_engine(self, num_global: int, tokens: int) -> None:
        """vLLM 0.32 printed these numbers when it served models of 21 layers with 4 GiB of cache."""
        assert VLLM.plan(LAYERS, num_global).tokens(LAYERS, 4 * GIB) == tokens

    @pytest.mark.parametrize("grid", GRIDS)
    def test_units_of_any_size_take_the_same_memory(self, grid: tuple[int, int]) -> None:
        cache = replace(LAYERS, grid=grid)
        for number in range(grid[0] + 1):
            rows = [(None,) * grid[1]] * number + [(128,) * grid[1]] * (grid[0] - number)
            plans = {plan_parts(cache, count_parts(rows, size)) for size in (1, grid[1])}
            assert plans == {VLLM.plan(cache, number * grid[1])}

    def test_parts_by_kind(self) -> None:
        layers = [(128,) * 4, (None,) * 4, (128, None, 512, 128)]
        assert count_parts(layers, 0) == {
            Part(4, 128): 1,
            Part(4, None): 1,
            Part(1, None): 1,
            Part(2, 128): 1,
            Part(1, 512): 1,
        }
        assert count_parts(layers, 1) == {Part(1, None): 5, Part(1, 128): 6, Part(1, 512): 1}

    def test_a_smaller_part_has_longer_pages_or_padding(self) -> None:
        """Beside a part of 4 heads, one of 2 heads has pages of 256 tokens; one of 3 heads pads its own to 4."""
        cache = replace(LAYERS, grid=(1, 4), in_flight=1)
        page = 4 * 128 * cache.head_bytes
        for heads, pages in ((2, 128), (3, 256)):
            plan = plan_parts(cache, {Part(4, None): 1, Part(heads, None): 1})
            assert (plan.page_bytes, plan.request_pages) == (page, 256 + pages)

    def test_a_local_layer_reserves_window_and_chunk(self) -> None:
        plan = plan_parts(LAYERS, {Part(1, 128): 1})
        assert plan.request_pages == -(-(127 + 2048) // 128) + 1
        whole = replace(LAYERS, in_flight=LAYERS.context)
        assert plan_parts(whole, {Part(1, 128): 1}).request_pages == 256 + 1

    @pytest.mark.parametrize("num_global", [0, 7, 9, 21])
    def test_a_sink_token_takes_a_page_in_every_group_of_local_layers(
        self, num_global: int
    ) -> None:
        plan, with_sink = (VLLM.plan(replace(LAYERS, sinks=sinks), num_global) for sinks in (0, 1))
        # 21, 14, 12 and no local layers in groups of 21, 7, 12
        groups = {0: 1, 7: 2, 9: 1, 21: 0}[num_global]
        assert with_sink.request_bytes - plan.request_bytes == groups * with_sink.page_bytes

    def test_short_contexts_favour_full_attention(self) -> None:
        cache = replace(LAYERS, grid=(7, 1), context=512)
        assert VLLM.plan(cache, 2).tokens(cache, GIB) < VLLM.plan(cache, 7).tokens(cache, GIB)


class TestSeveralWindows:
    """6 heads with window 128, 6 with 1,024, 3 with 4,096 and 6 global ones; 256 pages of 128 tokens a request."""

    windows = ((128, 1024, None), (128, 1024, None), (128, 1024, 4096)) * 2
    windows = (*windows, (None, None, 4096))
    cache = replace(LAYERS, grid=(7, 3))
    # Of 2,175, 3,071 and 6,143 tokens, and one a group
    local_pages = 2 * (17 + 1) + 2 * (24 + 1) + (48 + 1)

    def test_every_window_has_groups_of_its_own(self) -> None:
        """Units of one head: groups of 3, as many as there are heads with the rarest window."""
        plan = VLLM.plan_layout(self.cache, self.windows)
        assert plan.form == "units of 1 head"
        assert plan.page_bytes == 3 * 128 * self.cache.head_bytes
        assert plan.request_pages == 2 * 256 + self.local_pages

    def test_first_tokens_of_all_windows_share_groups(self) -> None:
        """The caches of 15 heads make five groups."""
        plan = VLLM.plan_layout(replace(self.cache, sinks=1), self.windows)
        assert plan.request_pages == 2 * 256 + self.local_pages + 5

    def test_whole_layers(self) -> None:
        windows = ((128,) * 3, (1024,) * 3, (4096,) * 3, (None,) * 3)
        plan = VLLM.plan_layout(replace(self.cache, grid=(4, 3)), windows)
        assert (plan.form, plan.request_pages) == ("whole layers", 256 + 18 + 25 + 49)

    def test_four_are_refused(self) -> None:
        layout = Layout.from_windows(((128, 1024, None), (256, 512, None)))
        with pytest.raises(
            UserError, match=r"at most 3 windows of local heads, .* but the layout has 4\nleave out"
        ):
            COST.layout_plan(layout)


def rows(counts: list[int]) -> list[tuple[int | None, ...]]:
    """Return the windows of layers of 4 heads, of which ``counts`` are global."""
    return [(None,) * count + (128,) * (4 - count) for count in counts]


class TestLayouts:
    cache = replace(LAYERS, grid=(21, 4))

    def test_whole_layers(self) -> None:
        layout = VLLM.plan_layout(self.cache, rows([4] * 9 + [0] * 12))
        assert (layout.form, layout) == ("whole layers", VLLM.plan(self.cache, 36))

    def test_the_largest_units(self) -> None:
        """A single layer of another kind than the others sets groups of one module, so units take less."""
        counts = [2] * 20 + [4]
        layout = VLLM.plan_layout(self.cache, rows(counts))
        by_kind = plan_parts(self.cache, count_parts(rows(counts), 0))
        assert (layout.form, layout) == ("units of 2 heads", VLLM.plan(self.cache, 44))
        assert layout.request_bytes < by_kind.request_bytes

    def test_by_kind(self) -> None:
        """With 2 of 4 heads global in every layer, both give two groups; the split by kind has fewer modules."""
        layout = VLLM.plan_layout(self.cache, rows([2] * 21))
        assert layout.form == "split by kind"
        assert layout.request_bytes == VLLM.plan(self.cache, 42).request_bytes


class TestBudgets:
    def test_twelve_layers_cost_what_nine_do(self) -> None:
        assert [COST.max_heads_same_memory(number, 21) for number in (8, 9, 10, 21)] == [
            8,
            12,
            11,
            21,
        ]
        assert COST.max_heads_same_memory(27, 63) == 36
        assert COST.max_heads_same_memory(9 * 3, 63, stride=3) == 36
        assert COST.max_heads_same_memory(30, 63) == 33

    def test_the_largest_budget_fits_and_the_next_step_does_not(self) -> None:
        memory = COST.total(8, 21)
        assert COST.largest_budget(memory, 21) == 8
        assert COST.largest_budget(memory - 1, 21) == 7
        assert COST.largest_budget(COST.total(9, 21), 21) == 12
        assert COST.largest_budget(COST.total(9, 21), 21, most=10) == 10
        assert COST.largest_budget(COST.total(11, 21), 21, most=9) == 8

    def test_memory_is_that_of_all_requests_and_a_page(self) -> None:
        plan = VLLM.plan(LAYERS, 8)
        assert COST.total(8, 21) == 10 * plan.request_bytes + plan.page_bytes

    def test_too_little_memory(self) -> None:
        with pytest.raises(
            UserError, match=r"1\.00 KiB is too small in vLLM 0\.32: 10 requests of 32,768"
        ):
            COST.largest_budget(1024, 21)

    def test_sink_tokens_that_engines_do_not_keep_are_refused(self) -> None:
        with pytest.raises(
            UserError,
            match=r"vLLM 0\.32 keeps at most 1 sink token for local heads, but the layout has 4",
        ):
            replace(COST, sinks=4)


@dataclass(frozen=True)
class Case:
    """Parts of a model, to be planned here and by vLLM."""

    cache: ServedCache
    parts: Mapping[Part, int]
    memory: int

    def document(self) -> dict[str, object]:
        """Return the case as ``vllm_capacity.py`` reads it; layers of one kind alternate with others."""
        layers = [[part.num_heads, part.window] for part in Counter(self.parts).elements()]
        np.random.default_rng(len(layers)).shuffle(layers)
        cache = self.cache
        return {
            "layers": layers, "head_dim": cache.head_dim, "dtype": cache.dtype, "context": cache.context,
            "page_size": cache.page_size, "batched_tokens": cache.in_flight, "memory": self.memory,
            "sinks": cache.sinks,
        }  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield every number of global layers and heads of three grids, whole, in units, and by kind."""
    rng = np.random.default_rng(0)
    for num_layers, num_kv_heads in GRIDS:
        cache = ServedCache((num_layers, num_kv_heads), 128, "bfloat16", 128, 32768, 16, 8192)
        for layers in range(num_layers + 1):
            for context, page_size, in_flight in (
                (32768, 16, 8192),
                (32768, 128, 2048),
                (512, 16, 512),
                (1000, 48, 7),
            ):
                settings = replace(cache, context=context, page_size=page_size, in_flight=in_flight)
                wide = replace(settings, head_dim=80, dtype="float32")
                for window, served, memory in ((128, settings, 4 * GIB), (1024, wide, 10**9 + 7)):
                    whole = [(None,) * num_kv_heads] * layers + [(window,) * num_kv_heads] * (
                        num_layers - layers
                    )
                    yield Case(served, count_parts(whole, num_kv_heads), memory)
        for heads in range(cache.num_heads + 1):  # with one window, or three
            local = rng.choice([64, 512, 4096] if heads % 2 else [128], cache.num_heads)
            layout = (
                np.where(rng.permutation(cache.num_heads) < heads, None, local)
                .reshape(cache.grid)
                .tolist()
            )
            by_kind, units = count_parts(layout, 0), count_parts(layout, 1)
            yield Case(cache, units, 40 * GIB + 12345)
            yield Case(cache, by_kind, 40 * GIB + 12345)
            yield Case(replace(cache, sinks=1), by_kind, 40 * GIB)
            yield Case(replace(cache, sinks=1, page_size=128), units, 40 * GIB)
        # The same number in every layer, and in every other one
        for heads in range(num_kv_heads + 1):
            row, local = (None,) * heads + (128,) * (num_kv_heads - heads), (128,) * num_kv_heads
            yield Case(cache, count_parts([row] * num_layers, 0), 40 * GIB)
            yield Case(
                cache,
                count_parts([row if layer % 2 else local for layer in range(num_layers)], 0),
                40 * GIB,
            )


@needs_vllm
@pytest.mark.slow
def test_plans_equal_those_of_vllm() -> None:
    """Compare the tokens, concurrency and bytes of every case, and whether vLLM would start, with no difference."""
    everything = list(cases())
    script = Path(__file__).with_name("vllm_capacity.py")
    result = subprocess.run(
        [PYTHON, str(script)],
        input=json.dumps([case.document() for case in everything]),
        capture_output=True,
        text=True,
        check=True,
    )
    started = 0
    for case, answer in zip(everything, json.loads(result.stdout), strict=True):
        plan = plan_parts(case.cache, case.parts)
        assert answer["in_flight"] == case.cache.in_flight
        assert (plan.page_bytes, plan.request_bytes) == (
            answer["page_bytes"],
            answer["request_bytes"],
        ), case
        assert (plan.memory(1) <= case.memory) == answer["starts"], case
        if answer["starts"]:
            started += 1
            assert plan.concurrency(case.memory) == answer["concurrency"], case
            assert plan.tokens(case.cache, case.memory) == answer["tokens"], case
    assert 1000 < started < len(everything)
