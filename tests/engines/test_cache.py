"""Test the memory that serving engines plan: rules of vLLM's allocator, budgets that cost no more, and vLLM itself."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT
from vllm_server import PYTHON, needs_vllm

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.units import ITEM_BYTES
from spkv_nas.cost.cache_cost import EngineCost
from spkv_nas.engines.cache import CachePlan, CacheSettings, LayerCache, ModelCache
from spkv_nas.engines.engine import Serving
from spkv_nas.engines.vllm import VLLM, count_parts, plan_parts

GIB = 2**30

CONTEXT = 32768
# As served on a CPU: pages of 128 tokens, chunks of 2,048
CPU = CacheSettings(page_size=128, in_flight=2048)
HEAD = LayerCache(num_heads=1, key_dim=64, value_dim=64)  # 256 bytes a token in bfloat16
# 10 requests
COST = EngineCost(CONTEXT, 10, 128, 64, "bfloat16", serving=Serving(VLLM, CPU))
GRIDS = ((21, 3), (32, 8), (36, 8))


def part(num_heads: int, window: int | None) -> LayerCache:
    """Return KV heads with a window, or with all keys."""
    return replace(HEAD, num_heads=num_heads, window=window)


def plan_layers(
    num_global: int, num_layers: int = 21, *, context: int = CONTEXT, sinks: int = 0
) -> CachePlan:
    """Plan layers of one head of which some are global, the others with a window of 128."""
    local = replace(HEAD, window=128, sinks=sinks)
    parts = Counter({HEAD: num_global, local: num_layers - num_global})
    return plan_parts(+parts, CPU, context)


def tokens(plan: CachePlan, memory: int, context: int = CONTEXT) -> int:
    """Return the tokens that fit in a memory."""
    return int(plan.concurrency(memory) * context)


def plan_rows(rows: Sequence[Sequence[int | None]], sinks: int = 0) -> CachePlan:
    """Plan a layout from the windows of its heads by layer, in the smallest form."""
    parts = count_parts(rows, 0, replace(HEAD, sinks=sinks))
    is_split = any(len(set(row)) > 1 for row in rows)
    model = ModelCache(tuple(parts.elements()), is_split=is_split)
    return VLLM.plan(model, CPU, CONTEXT)


class TestVllm:
    @pytest.mark.parametrize(
        ("num_global", "expected"),
        [
            (7, 2_101_191),
            (8, 1_838_599),
            (9, 1_306_175),
            (12, 1_306_175),
            (13, 1_012_963),
            (21, 798_848),
        ],
    )
    def test_reports_of_a_running_engine(self, num_global: int, expected: int) -> None:
        """vLLM 0.32 printed these numbers when it served models of 21 layers with 4 GiB of cache."""
        assert tokens(plan_layers(num_global), 4 * GIB) == expected

    @pytest.mark.parametrize("grid", GRIDS)
    def test_units_of_any_size_take_the_same_memory(self, grid: tuple[int, int]) -> None:
        for number in range(grid[0] + 1):
            rows = [(None,) * grid[1]] * number + [(128,) * grid[1]] * (grid[0] - number)
            plans = [
                plan_parts(count_parts(rows, size, HEAD), CPU, CONTEXT) for size in (1, grid[1])
            ]
            sizes = {(plan.page_bytes, plan.request_pages) for plan in plans}
            assert sizes == {(plans[0].page_bytes, plans[0].request_pages)}

    def test_parts_by_kind(self) -> None:
        layers = [(128,) * 4, (None,) * 4, (128, None, 512, 128)]
        assert count_parts(layers, 0, HEAD) == {
            part(4, 128): 1,
            part(4, None): 1,
            part(1, None): 1,
            part(2, 128): 1,
            part(1, 512): 1,
        }
        units = {part(1, None): 5, part(1, 128): 6, part(1, 512): 1}
        assert count_parts(layers, 1, HEAD) == units

    def test_a_smaller_part_has_longer_pages_or_padding(self) -> None:
        """Beside a part of 4 heads, one of 2 heads has pages of 256 tokens; one of 3 heads pads its own to 4."""
        settings = replace(CPU, in_flight=1)
        for heads, pages in ((2, 2), (3, 3)):
            plan = plan_parts({part(4, None): 1, part(heads, 257): 1}, settings, CONTEXT)
            # 257 tokens in pages of 256, or of 128, and one more
            assert (plan.page_bytes, plan.request_pages) == (4 * 128 * 256, 256 + pages + 1)

    def test_layers_that_keep_all_tokens_share_a_page_table_whatever_their_sizes(self) -> None:
        """vLLM puts them in one group (``UniformTypeKVCacheSpecs``), so nothing is padded."""
        plan = plan_parts({part(4, None): 1, part(3, None): 2}, CPU, CONTEXT)
        assert (plan.page_bytes, plan.request_pages) == ((4 + 2 * 3) * 128 * 256, 256)

    def test_a_local_layer_reserves_window_and_chunk(self) -> None:
        plan = plan_parts({part(1, 128): 1}, CPU, CONTEXT)
        assert plan.request_pages == -(-(127 + 2048) // 128) + 1
        whole = replace(CPU, in_flight=CONTEXT)
        assert plan_parts({part(1, 128): 1}, whole, CONTEXT).request_pages == 256 + 1

    @pytest.mark.parametrize("num_global", [0, 7, 9, 21])
    def test_a_sink_token_takes_a_page_in_every_group_of_local_layers(
        self, num_global: int
    ) -> None:
        plan, with_sink = (plan_layers(num_global, sinks=sinks) for sinks in (0, 1))
        # 21, 14, 12 and no local layers in groups of 21, 7, 12
        groups = {0: 1, 7: 2, 9: 1, 21: 0}[num_global]
        assert with_sink.request_bytes - plan.request_bytes == groups * with_sink.page_bytes

    def test_short_contexts_favour_full_attention(self) -> None:
        hybrid, full = (plan_layers(number, 7, context=512) for number in (2, 7))
        assert tokens(hybrid, GIB, 512) < tokens(full, GIB, 512)


class TestSeveralWindows:
    """6 heads with window 128, 6 with 1,024, 3 with 4,096 and 6 global ones; 256 pages of 128 tokens a request."""

    windows = ((128, 1024, None), (128, 1024, None), (128, 1024, 4096)) * 2
    windows = (*windows, (None, None, 4096))
    # Of 2,175, 3,071 and 6,143 tokens, and one a group
    local_pages = 2 * (17 + 1) + 2 * (24 + 1) + (48 + 1)

    def test_every_window_has_groups_of_its_own(self) -> None:
        """Units of one head: groups of 3, as many as there are heads with the rarest window."""
        plan = plan_rows(self.windows)
        assert plan.form == "units of 1 head"
        assert plan.page_bytes == 3 * 128 * 256
        assert plan.request_pages == 2 * 256 + self.local_pages

    def test_first_tokens_of_all_windows_share_groups(self) -> None:
        """The caches of 15 heads make five groups."""
        plan = plan_rows(self.windows, sinks=1)
        assert plan.request_pages == 2 * 256 + self.local_pages + 5

    def test_whole_layers(self) -> None:
        windows = ((128,) * 3, (1024,) * 3, (4096,) * 3, (None,) * 3)
        plan = plan_rows(windows)
        assert (plan.form, plan.request_pages) == ("whole layers", 256 + 18 + 25 + 49)

    def test_four_are_refused(self) -> None:
        layout = Layout.from_windows(((128, 1024, None), (256, 512, None)))
        with pytest.raises(
            UserError, match=r"at most 3 windows of local heads, .* but the layout has 4\nleave out"
        ):
            COST.layout_plan(layout, range(2))


def rows(counts: list[int]) -> list[tuple[int | None, ...]]:
    """Return the windows of layers of 4 heads, of which ``counts`` are global."""
    return [(None,) * count + (128,) * (4 - count) for count in counts]


class TestLayouts:
    def units(self, num_global: int) -> int:
        """Return the bytes of a request of 84 heads in units of one."""
        return plan_layers(num_global, 84).request_bytes

    def test_whole_layers(self) -> None:
        layout = plan_rows(rows([4] * 9 + [0] * 12))
        assert (layout.form, layout.request_bytes) == ("whole layers", self.units(36))

    def test_the_largest_units(self) -> None:
        """A single layer of another kind than the others sets groups of one module, so units take less."""
        counts = [2] * 20 + [4]
        layout = plan_rows(rows(counts))
        by_kind = plan_parts(count_parts(rows(counts), 0, HEAD), CPU, CONTEXT)
        assert (layout.form, layout.request_bytes) == ("units of 2 heads", self.units(44))
        assert layout.request_bytes < by_kind.request_bytes

    def test_by_kind(self) -> None:
        """With 2 of 4 heads global in every layer, both give two groups; the split by kind has fewer modules."""
        layout = plan_rows(rows([2] * 21))
        assert layout.form == "split by kind"
        assert layout.request_bytes == self.units(42)


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
        plan = plan_layers(8)
        assert COST.total(8, 21) == 10 * plan.request_bytes + plan.page_bytes

    def test_layers_with_native_windows_are_counted(self) -> None:
        """Gemma 3 4B: 5 global layers and 29 with a window of 1,024, as in tests/cost/test_model_cache.py."""
        serving = Serving(VLLM, VLLM.defaults)
        gemma = EngineCost(
            CONTEXT, 1, 128, 256, "bfloat16", serving=serving, native_heads=(1024,) * 116
        )
        whole = (2048 + 6 * 1089) * 16 * 4096 * 5
        assert gemma.plan(20, 136).request_bytes == whole
        # Its letters in layers with a native window have no effect
        heads = tuple("GGGG" if layer % 6 == 5 else "LLLL" for layer in range(34))
        plan = gemma.layout_plan(Layout(heads, window=128), range(5, 34, 6))
        assert plan is not None
        assert plan.request_bytes == whole
        local = gemma.layout_plan(Layout(("LLLL",) * 34, window=128), range(5, 34, 6))
        assert local is not None
        assert local.request_bytes == (1033 + 6 * 1089) * 16 * 4096 * 5

    def test_a_model_whose_layers_all_have_a_window(self) -> None:
        """Mistral 7B: a global head keeps 4,096 tokens."""
        serving = Serving(VLLM, VLLM.defaults)
        mistral = EngineCost(CONTEXT, 1, 128, 128, "bfloat16", serving=serving, global_window=4096)
        assert mistral.plan(256, 256).request_bytes == 1281 * 16 * 512 * 256

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

    parts: Mapping[LayerCache, int]
    dtype: str
    settings: CacheSettings
    context: int
    memory: int

    @property
    def plan(self) -> CachePlan:
        """Return the plan."""
        item_bytes = ITEM_BYTES[self.dtype]
        return plan_parts(self.parts, self.settings, self.context, Fraction(item_bytes))

    def document(self) -> dict[str, object]:
        """Return the case as ``vllm_capacity.py`` reads it; layers of one kind alternate with others."""
        layers = [[kept.num_heads, kept.window] for kept in Counter(self.parts).elements()]
        np.random.default_rng(len(layers)).shuffle(layers)
        return {
            "layers": layers, "head_dim": next(iter(self.parts)).key_dim, "dtype": self.dtype,
            "context": self.context, "page_size": self.settings.page_size,
            "batched_tokens": self.settings.in_flight, "memory": self.memory,
            "sinks": max(kept.sinks for kept in self.parts),
        }  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield every number of global layers and heads of three grids, whole, in units, and by kind."""
    rng = np.random.default_rng(0)
    for num_layers, num_kv_heads in GRIDS:
        head = LayerCache(num_heads=1, key_dim=128, value_dim=128)
        gpu = CacheSettings(page_size=16, in_flight=8192)
        for layers in range(num_layers + 1):
            for context, page_size, in_flight in (
                (32768, 16, 8192),
                (32768, 128, 2048),
                (512, 16, 512),
                (1000, 48, 7),
            ):
                settings = CacheSettings(page_size=page_size, in_flight=in_flight)
                wide = LayerCache(num_heads=1, key_dim=80, value_dim=80)
                for window, one, dtype, memory in (
                    (128, head, "bfloat16", 4 * GIB),
                    (1024, wide, "float32", 10**9 + 7),
                ):
                    whole = [(None,) * num_kv_heads] * layers + [(window,) * num_kv_heads] * (
                        num_layers - layers
                    )
                    parts = count_parts(whole, num_kv_heads, one)
                    yield Case(parts, dtype, settings, context, memory)
        num_heads = num_layers * num_kv_heads
        for heads in range(num_heads + 1):  # with one window, or three
            local = rng.choice([64, 512, 4096] if heads % 2 else [128], num_heads)
            layout = (
                np.where(rng.permutation(num_heads) < heads, None, local)
                .reshape(num_layers, num_kv_heads)
                .tolist()
            )
            with_sink = replace(head, sinks=1)
            for kept, unit, page_size, memory in (
                (head, 1, 16, 40 * GIB + 12345),
                (head, 0, 16, 40 * GIB + 12345),
                (with_sink, 0, 16, 40 * GIB),
                (with_sink, 1, 128, 40 * GIB),
            ):
                settings = replace(gpu, page_size=page_size)
                yield Case(count_parts(layout, unit, kept), "bfloat16", settings, CONTEXT, memory)
        # The same number in every layer, and in every other one
        for heads in range(num_kv_heads + 1):
            row, local = (None,) * heads + (128,) * (num_kv_heads - heads), (128,) * num_kv_heads
            mixed = [row if layer % 2 else local for layer in range(num_layers)]
            for windows in ([row] * num_layers, mixed):
                parts = count_parts(windows, 0, head)
                yield Case(parts, "bfloat16", gpu, CONTEXT, 40 * GIB)


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
        plan = case.plan
        assert answer["in_flight"] == case.settings.in_flight
        assert (plan.page_bytes, plan.request_bytes) == (
            answer["page_bytes"],
            answer["request_bytes"],
        ), case
        assert (plan.memory(1) <= case.memory) == answer["starts"], case
        if answer["starts"]:
            started += 1
            assert plan.concurrency(case.memory) == answer["concurrency"], case
            assert tokens(plan, case.memory, case.context) == answer["tokens"], case
    assert 1000 < started < len(everything)


@needs_vllm
@pytest.mark.slow
def test_plans_of_published_models_equal_those_of_vllm() -> None:
    """Compare bytes of a page and of a request, and the concurrency: 17 models, three contexts, two settings."""
    script = Path(__file__).with_name("vllm_published.py")
    command = [PYTHON, str(script), str(ROOT / "tests" / "published")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(result.stdout)
    assert len(rows) == 17 * 3 * 2
    assert [row for row in rows if row[3] != row[4]] == []
