"""Memory of the KV cache as a serving engine plans it, in the form in which budgets of bytes are read."""

from __future__ import annotations

from dataclasses import dataclass, field

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.units import format_bytes
from spkv_nas.cost.formulas import CacheCost
from spkv_nas.engines.cache import LayoutPlan, ServedCache, Serving


@dataclass(frozen=True)
class EngineCost(CacheCost):
    """Bytes that a serving engine needs for ``batch`` requests of ``context`` tokens.

    Budgets are counted for whole layers or units of equal numbers of heads, where only the number of global heads
    matters. ``layout_total`` counts a layout, which can take less.

    Attributes:
        serving: the engine and its settings.
    """

    serving: Serving = field(kw_only=True)

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UserError: as ``CacheCost``, local heads see more sink tokens than the engine keeps, or some heads are
                local by design.
        """
        super().__post_init__()
        self.serving.engine.check_sinks(self.sinks, "leave out --engine, or use fewer --sinks")
        if self.native_heads or self.global_window < self.context:
            raise UserError(
                "layers of the model have a sliding window by design, which --engine does not count\nleave out --engine"
            )

    def total(self, num_global: int, num_heads: int) -> int:
        """Return the bytes of a model with ``num_global`` of ``num_heads`` KV heads global."""
        return self.serving.engine.plan(self.cache(num_heads), num_global).memory(self.batch)

    def largest_budget(self, limit: int, num_heads: int) -> int:
        """Return the largest number of global heads whose requests fit in ``limit`` bytes.

        Raises:
            UserError: they do not fit with any number of global heads.
        """
        return self.fitting(limit, num_heads, num_heads)

    def fitting(self, limit: int, most: int, num_heads: int) -> int:
        """Return the largest number of global heads, at most ``most``, whose requests fit in ``limit`` bytes.

        Raises:
            UserError: they do not fit with 1 to ``most`` global heads.
        """
        totals = {number: self.total(number, num_heads) for number in range(most, 0, -1)}
        budget = next((number for number, total in totals.items() if total <= limit), None)
        if budget is None:
            least = min(totals.values(), default=self.total(1, num_heads))
            raise UserError(
                f"{format_bytes(limit)} is too small in {self.serving.engine.title}: {self.batch} requests of "
                f"{self.context:,} tokens need at least {format_bytes(least)} with 1 to {max(1, most)} global heads\n"
                "use more memory, a shorter --context, a smaller --batch or another --kv-dtype"
            )
        return budget

    def layout_total(self, layout: Layout) -> int | None:
        """Return the bytes of a layout in the form that takes least; None where the engine does not run it."""
        served = self.layout_plan(layout)
        return None if served is None else served.plan.memory(self.batch)

    def layout_plan(self, layout: Layout) -> LayoutPlan | None:
        """Plan the cache of a layout in the form that takes least; None where the engine does not run it."""
        if self.limit(layout) is not None:
            return None
        cache = self.serving.cache(
            layout.grid,
            head_dim=self.head_dim,
            dtype=self.dtype,
            window=layout.window,
            context=self.context,
            sinks=layout.sinks,
        )
        return self.serving.engine.plan_layout(cache, layout.global_mask.sum(1).tolist())

    def limit(self, layout: Layout) -> str | None:
        """Return the limit that keeps the engine from running a layout, after "runs"; None if it runs the layout."""
        engine = self.serving.engine
        if layout.sinks > engine.max_sinks:
            return engine.sink_limit
        return None if engine.per_head or layout.is_layerwise else "whole layers only"

    def cache(self, num_heads: int) -> ServedCache:
        """Return the sizes of a model's cache, in which only the numbers of heads matter."""
        return self.serving.cache(
            (num_heads, 1),
            head_dim=self.head_dim,
            dtype=self.dtype,
            window=self.window,
            context=self.context,
            sinks=self.sinks,
        )

    def max_heads_same_memory(self, num_global: int, num_heads: int, *, stride: int = 1) -> int:
        """Return the largest number of global heads that takes no more memory than ``num_global``.

        Args:
            num_global: number of global heads.
            num_heads: number of KV heads.
            stride: heads by which budgets grow, such as Hkv for whole layers.
        """
        limit = self.total(num_global, num_heads)
        larger = range(num_heads, num_global, -stride)
        return next((number for number in larger if self.total(number, num_heads) <= limit), num_global)
