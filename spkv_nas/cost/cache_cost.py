"""Count the memory of a KV cache: bytes of keys and values, or what a serving engine's allocator plans."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from spkv_nas.artifacts import head_scores, local_layers
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base import errors, limits
from spkv_nas.base.units import ITEM_BYTES, format_bytes, parse_bytes
from spkv_nas.cost.formulas import head_bytes
from spkv_nas.engines.cache import CachePlan, LayerCache, ModelCache
from spkv_nas.engines.engine import Serving

CONTEXT = 131_072  # tokens; longest sequence whose cache is counted by default


@dataclass(frozen=True)
class CacheCost:
    """Bytes of keys and values in the cache, without page rounding and index."""

    context: int  # tokens per sequence
    batch: int  # sequences held at once
    window: int  # visible recent keys of a local head
    head_dim: int  # D, of keys and of values, of the heads that can be global
    dtype: str  # of the cache, one of ``ITEM_BYTES``
    sinks: int = 0  # first tokens that a local head keeps besides its window
    # windows of the KV heads that are local by design, whose letter in a layout has no effect
    native_heads: tuple[int, ...] = ()
    native_dims: tuple[int, ...] = ()  # their D; empty: ``head_dim``
    # visible recent keys of a global head, if every layer of the model has a native window
    global_window: int = limits.MAX_WINDOW

    def __post_init__(self) -> None:
        """Raise ``UserError`` if a number is too small, or the dtype is unknown."""
        for name in ("context", "batch", "window", "head_dim"):
            if getattr(self, name) < 1:
                raise errors.UserError(
                    f"--{name.replace('_', '-')} must be at least 1; found {getattr(self, name)}"
                )
        if self.sinks < 0:
            raise errors.UserError(f"--sinks must be at least 0; found {self.sinks}")
        if self.dtype not in ITEM_BYTES:
            raise errors.UserError(
                f"the data type '{self.dtype}' of keys and values is unknown; expected one of "
                f"{', '.join(ITEM_BYTES)}"
            )

    @property
    def global_head(self) -> int:
        """Return the bytes of one global KV head, over all sequences."""
        return self._head(self.global_window)

    @property
    def local_head(self) -> int:
        """Return the bytes of one local KV head, which stores only its window and sink tokens, over all sequences."""
        if self.window >= self.global_window:
            return self.global_head
        return self._head(self.window + self.sinks)

    def total(self, num_global: int, num_heads: int) -> int:
        """Return the bytes of a model with ``num_global`` of ``num_heads`` KV heads global."""
        num_local = num_heads - num_global - len(self.native_heads)
        # Heads that are local by design, of their own sizes
        native_dims = self.native_dims or [self.head_dim] * len(self.native_heads)
        native = sum(map(self._head, self.native_heads, native_dims))
        return num_global * self.global_head + num_local * self.local_head + native

    def of_heads(self, windows: Iterable[int | None]) -> int:
        """Return the bytes of a model whose KV heads that can be global have these windows; None for global heads."""
        total = self.total(0, len(self.native_heads))
        for window in windows:
            total += self.global_head if window is None else replace(self, window=window).local_head
        return total

    def layout_bytes(self, layout: Layout, layers: Sequence[int]) -> int:
        """Return the bytes of a layout, of which ``layers`` are those whose heads can be global."""
        head_windows = layout.head_windows
        return self.of_heads(window for layer in layers for window in head_windows[layer])

    def full(self, num_heads: int) -> int:
        """Return the bytes of full attention."""
        return self.total(num_heads - len(self.native_heads), num_heads)

    def num_global_within(self, limit: float, num_heads: int, most: int | None = None) -> int:
        """Return the largest number of global heads, at most ``most``, that fits in ``limit`` bytes; 0 if none does."""
        most = num_heads - len(self.native_heads) if most is None else most
        # Try every number, because an engine's memory need not grow with it
        for number in range(most, 0, -1):
            if self.total(number, num_heads) <= limit:
                return number
        return 0

    def largest_budget(self, limit: int, num_heads: int, most: int | None = None) -> int:
        """Return ``num_global_within``. Raises ``UserError`` if it is 0."""
        budget = self.num_global_within(limit, num_heads, most)
        if not budget:
            most = num_heads - len(self.native_heads) if most is None else most
            least = min(self.total(number, num_heads) for number in range(1, max(1, most) + 1))
            raise errors.UserError(
                f"{format_bytes(limit)} is too small{self.where}: {self.batch} requests of "
                f"{self.context:,} tokens need at least {format_bytes(least)} with 1 to "
                f"{max(1, most)} global heads\n"
                "use more memory, a shorter --context, fewer sequences or a smaller data type"
            )
        return budget

    @property
    def where(self) -> str:
        """Return where the cache is, to end a clause."""
        return ""

    def _head(self, reach: int, head_dim: int | None = None) -> int:
        """Return the bytes of one KV head that keeps up to ``reach`` keys, over all sequences."""
        keys = min(reach, self.context)
        num_bytes = head_bytes(keys, head_dim or self.head_dim, ITEM_BYTES[self.dtype])
        return self.batch * int(num_bytes)


def parse_memory(memory: str | float) -> float:
    """Parse a limit on the KV cache: a share of full attention's such as "20%" or 0.2, or bytes such as "2GiB".

    Raises ``UserError``: it is neither, or a share that is not between 0 and 100 %.
    """
    text = str(memory).strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return parse_bytes(text)
    if share >= 1.0 and not text.endswith("%"):
        return parse_bytes(text)
    if not 0.0 < share < 1.0:
        raise errors.UserError(
            f"--memory {text[:40]}: give a share of full attention's KV cache between 0 and 100 %, "
            "such as 20%, or bytes, such as 2GiB"
        )
    return share


def memory_bytes(memory: str | float, cost: CacheCost, num_heads: int) -> int:
    """Return a limit on the KV cache of a model with ``num_heads`` KV heads in bytes; errors as ``parse_memory``."""
    limit = parse_memory(memory)
    return int(limit * cost.full(num_heads)) if limit < 1.0 else int(limit)


@dataclass(frozen=True)
class EngineCost(CacheCost):
    """Bytes that a serving engine needs for ``batch`` requests of ``context`` tokens.

    Budgets are counted for whole layers or units of equal numbers of heads, where only the number of global heads
    matters. ``layout_plan`` counts a layout, which can take less.
    """

    serving: Serving = field(kw_only=True)  # the engine and its settings

    def __post_init__(self) -> None:
        """Raise ``UserError`` also if the engine keeps fewer sink tokens."""
        super().__post_init__()
        self.serving.engine.check_sinks(self.sinks, "leave out --engine, or use fewer --sinks")

    def total(self, num_global: int, num_heads: int) -> int:
        """Return the bytes of a model with ``num_global`` of ``num_heads`` KV heads global."""
        return self.plan(num_global, num_heads).memory(self.batch)

    def plan(self, num_global: int, num_heads: int) -> CachePlan:
        """Plan the cache of a model with ``num_global`` of ``num_heads`` KV heads global."""
        num_local = num_heads - num_global - len(self.native_heads)
        layers = [self._part(1, None)] * num_global + [self._part(1, self.window)] * num_local
        native_dims = self.native_dims or [self.head_dim] * len(self.native_heads)
        for window, size in zip(self.native_heads, native_dims, strict=True):
            layers.append(LayerCache(1, size, size, window))
        return self._planned(layers, is_split=False)

    @property
    def where(self) -> str:
        """Return the engine, to end a clause."""
        return f" in {self.serving.engine.title}"

    def layout_plan(self, layout: Layout, layers: Sequence[int]) -> CachePlan | None:
        """Plan a layout's cache in its smallest form; ``layers`` are those whose heads can be global.

        Returns None for too many sink tokens. Raises ``UserError`` for too many windows.
        """
        if layout.sinks > self.serving.engine.max_sinks:
            return None
        self.serving.engine.check_windows(
            len(layout.windows), "leave out --engine, or use fewer windows"
        )
        cost = replace(self, sinks=layout.sinks)
        parts = []
        num_native = 0
        for layer, row in enumerate(layout.head_windows):
            if layer in layers:
                parts += [cost._part(count, window) for window, count in Counter(row).items()]
                continue
            # Its heads are all alike
            size = self.native_dims[num_native] if self.native_dims else self.head_dim
            parts.append(LayerCache(len(row), size, size, self.native_heads[num_native]))
            num_native += len(row)
        return self._planned(parts, is_split=True)

    def layout_bytes(self, layout: Layout, layers: Sequence[int]) -> int:
        """Return the bytes that the engine plans for a layout."""
        plan = self.layout_plan(layout, layers)
        assert plan is not None  # its sink tokens were checked
        return plan.memory(self.batch)

    def _part(self, num_heads: int, window: int | None) -> LayerCache:
        """Return what KV heads keep that can be global: with a window, or with all keys that the model sees."""
        if window is None or window >= self.global_window:
            reach = None if self.global_window >= limits.MAX_WINDOW else self.global_window
            return LayerCache(num_heads, self.head_dim, self.head_dim, reach)
        return LayerCache(num_heads, self.head_dim, self.head_dim, window, self.sinks)

    def _planned(self, parts: Sequence[LayerCache], *, is_split: bool) -> CachePlan:
        """Plan parts of layers, which the engine may divide if ``is_split``."""
        model = ModelCache(tuple(parts), dtype=self.dtype, is_split=is_split)
        return self.serving.plan(model, self.context)

    def max_heads_same_memory(self, num_global: int, num_heads: int, *, stride: int = 1) -> int:
        """Return the most global heads that take no more memory than ``num_global``, in steps of ``stride`` heads."""
        limit = self.total(num_global, num_heads)
        for number in range(num_heads, num_global, -stride):
            if self.total(number, num_heads) <= limit:
                return number
        return num_global


def token_bytes(table: head_scores.HeadScores) -> float | None:
    """Return the bytes of one token in one KV head's cache; None if the probe does not record them."""
    head_dim = table.record.head_dim
    dtype = table.record.dtype
    if head_dim is None or dtype not in ITEM_BYTES:
        return None
    return head_bytes(1, head_dim, ITEM_BYTES[dtype])


def cache_share(table: head_scores.HeadScores, density: float, context: int = CONTEXT) -> float:
    """Return the cache of one sequence of ``context`` tokens as a share of the unchanged model's.

    ``density`` is the share of the tokens outside the window that is kept, averaged over heads; for a layout, the share
    of heads that are global.
    """
    cost = _probe_cost(table, context)
    num_local = max(0.0, (1.0 - density) * table.num_heads - len(cost.native_heads))
    global_bytes = density * table.num_heads * cost.global_head
    native_bytes = cost.of_heads(())
    num_bytes = global_bytes + num_local * cost.local_head + native_bytes
    return num_bytes / cost.full(table.num_heads)


def _probe_cost(table: head_scores.HeadScores, context: int) -> CacheCost:
    """Return the cost of one sequence; in float32, with heads of one channel where the probe does not record them."""
    facts = {**table.cache_facts, "head_dim": table.cache_facts["head_dim"] or 1}
    dtype = table.record.dtype
    facts["dtype"] = dtype if dtype in ITEM_BYTES else "float32"
    return CacheCost(context, 1, table.window or DEFAULT_WINDOW, sinks=table.sinks, **facts)


def layout_share(
    layout: Layout,
    context: int,
    native_windows: Sequence[int | None] = (),
    head_dims: Sequence[int] = (),
) -> float:
    """Return the cache of one sequence of ``context`` tokens under a layout as a share of full attention's.

    ``native_windows`` are the sliding windows of the model's layers, None for full attention; empty: none has one.
    ``head_dims`` are the sizes of their heads; empty: all are equal. Raises ``UserError`` if the model has another
    number of layers.
    """
    layers = local_layers.config_layers(native_windows or [None] * layout.num_layers)
    if len(layers) != layout.num_layers:
        raise errors.UserError(
            f"layout '{layout.strategy}' has {layout.num_layers} layers, the model {len(layers)}"
        )
    # Count numbers: a share does not depend on the dtype, nor on the head dimension if all heads have the same
    facts = local_layers.cache_facts(
        layers, layout.heads_per_layer, head_dims or (1,) * layout.num_layers
    )
    cost = CacheCost(context, 1, layout.window, dtype="float32", sinks=layout.sinks, **facts)
    heads = [
        window
        for layer in local_layers.candidate_layers(layers)
        for window in layout.head_windows[layer]
    ]
    return cost.of_heads(heads) / cost.full(layout.num_heads)


def full_bytes(table: head_scores.HeadScores, context: int = CONTEXT) -> float | None:
    """Return the bytes of the unchanged model's cache for one sequence of ``context`` tokens; None if unknown."""
    if token_bytes(table) is None:
        return None
    return float(_probe_cost(table, context).full(table.num_heads))
