"""Find the layout of highest density coverage under a budget and a serving engine's constraints, exactly."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from spkv_nas.artifacts.grid import Grid, grid_words
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import DEFAULT_WINDOW, Layout
from spkv_nas.base.arrays import Float
from spkv_nas.base.errors import UserError
from spkv_nas.base.tables import Column, read_table
from spkv_nas.proposal import coverage, integer_program

# Strategy names of the layouts from ``solve``
CONSTRAINED = "constrained"
ROBUST = "robust"
_WEIGHTS = (
    Column("layer", "whole"),
    Column("kv_head", "whole"),
    Column("weight", "number", above=0, high=1e30),
)


@dataclass(frozen=True)
class Constraints:
    """Constraints that a serving engine or an architecture puts on a layout. Layers count from 0.

    Raises ``UserError``: a number is out of range, the granularity is unknown, or two constraints contradict.
    """

    # minimum number of global heads per layer; layers in ``global_layers`` or ``local_layers`` are exempt
    min_per_layer: int | None = None
    max_per_layer: int | None = None  # maximum number of global heads in the same layers
    global_layers: tuple[int, ...] = ()  # layers in which every head is global
    local_layers: tuple[int, ...] = ()  # layers in which every head is local
    granularity: str = "head"  # "head", or "layer" for whole layers only
    # Same number of global heads in every layer that mixes global and local heads
    uniform: bool = False
    # Most windows of local heads, for layouts with a window per head; None: three
    max_windows: int | None = None
    # windows of local heads to choose from, for such layouts; empty: those that were measured
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check each value, and the pairs that can contradict each other."""
        # Check the limits per layer
        for name, value in (
            ("min_per_layer", self.min_per_layer),
            ("max_per_layer", self.max_per_layer),
        ):
            if value is not None and value < 0:
                raise UserError(f"{_option(name, value)} must be at least 0")
        low = self.min_per_layer
        high = self.max_per_layer
        if low is not None and high is not None and low > high:
            raise UserError(f"min-per-layer={low} is more than max-per-layer={high}")
        # Check the windows, the fixed layers and the granularity
        if 0 in (self.max_windows, *self.windows):
            raise UserError("max-windows, and each of windows, must be at least 1")
        common_layers = set(self.global_layers) & set(self.local_layers)
        if common_layers:
            raise UserError(f"layer {min(common_layers)} is in global-layers and in local-layers")
        if self.granularity not in ("head", "layer"):
            raise UserError(f"--granularity must be head or layer; found '{self.granularity}'")

    @classmethod
    def parse(cls, texts: Sequence[str], granularity: str = "head") -> "Constraints":
        """Read constraints from texts such as "max-per-layer=2", "global-layers=0,20" and "uniform".

        Raises ``UserError``: a text has no such form, or as the constructor.
        """
        settings: dict[str, Any] = {}
        for text in texts:
            name, equals, value = text.strip().partition("=")
            if name in ("min-per-layer", "max-per-layer", "max-windows") and value.isdecimal():
                settings[name] = int(value)
            elif name == "windows" and all(part.isdecimal() for part in value.split(",")):
                settings[name] = tuple(int(part) for part in value.split(","))
            elif name in ("global-layers", "local-layers"):
                settings[name] = parse_layers(value, name)
            elif name == "uniform" and not equals:
                settings[name] = True
            else:
                raise UserError(
                    f"--constraint '{text}': expected min-per-layer=N, max-per-layer=N, "
                    "global-layers=0,20, local-layers=3-5, uniform, "
                    "max-windows=2 or windows=128,512"
                )
        return cls(
            min_per_layer=settings.get("min-per-layer"),
            max_per_layer=settings.get("max-per-layer"),
            global_layers=settings.get("global-layers", ()),
            local_layers=settings.get("local-layers", ()),
            granularity=granularity,
            uniform=settings.get("uniform", False),
            max_windows=settings.get("max-windows"),
            windows=settings.get("windows", ()),
        )

    @property
    def named(self) -> dict[str, object]:
        """Return the constraints on global heads that are set, by name, as plain values for files and messages."""
        named: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("max_windows", "windows") and value != field.default:
                named[field.name] = list(value) if isinstance(value, tuple) else value
        return named

    def on(self, table: HeadScores) -> "Constraints":
        """Return the constraints with ``local_layers`` extended by the layers that are local by design.

        Raises ``UserError``: one of them is in ``global_layers``.
        """
        if table.num_candidates == table.num_heads:
            return self
        native = set(range(table.num_layers)) - set(table.layers)
        wrong = native & set(self.global_layers)
        if wrong:
            raise UserError(
                f"global-layers: layer {min(wrong)} has a native sliding window, "
                "beyond which the model cannot attend"
            )
        return replace(self, local_layers=tuple(sorted(native | set(self.local_layers))))

    def broken_by(self, layout: Layout) -> list[str]:
        """Return the options, such as "--granularity layer", that a layout does not meet."""
        # Count the global heads of the layers that a minimum or maximum applies to, and of those that mix
        counts = layout.global_mask.sum(1)
        is_full = counts == np.array(layout.heads_per_layer)
        free = np.delete(counts, [*self.global_layers, *self.local_layers])
        mixed = counts[(counts > 0) & ~is_full]
        # Check each constraint that is set
        low = self.min_per_layer
        high = self.max_per_layer
        broken = {
            "min_per_layer": low is not None and (free < low).any(),
            "max_per_layer": high is not None and (free > high).any(),
            "global_layers": not is_full[list(self.global_layers)].all(),
            "local_layers": counts[list(self.local_layers)].any(),
            "granularity": self.granularity == "layer" and mixed.size > 0,
            "uniform": len(np.unique(mixed)) > 1,
        }
        return [_option(name, value) for name, value in self.named.items() if broken[name]]

    def check(self, grid: Grid) -> None:
        """Check that layers and head counts fit the grid. Raises ``UserError`` otherwise."""
        num_layers, num_kv_heads = grid
        for option, layers in (
            ("global-layers", self.global_layers),
            ("local-layers", self.local_layers),
        ):
            out_of_range = [layer for layer in layers if not 0 <= layer < num_layers]
            if out_of_range:
                raise UserError(
                    f"{option}: the model has no layer {out_of_range[0]}; "
                    f"give layers from 0 to {num_layers - 1}"
                )
        if (self.min_per_layer or 0) > num_kv_heads:
            raise UserError(
                f"min-per-layer={self.min_per_layer} is more than the {num_kv_heads} KV heads of a "
                "layer"
            )


def parse_layers(text: str, option: str) -> tuple[int, ...]:
    """Parse layer numbers from ``"0,20"`` or ``"3-5,8"``, ascending. Raises ``UserError`` that names ``option``."""
    layers: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        try:
            first = int(low)
            last = int(high if dash else low)
        except ValueError:
            first = 0
            last = -1
        if not 0 <= first <= last < 10**6:
            raise UserError(
                f"{option} '{text}' is not a list of layers; give for example 0,20 or 3-5"
            )
        layers |= set(range(first, last + 1))
    return tuple(sorted(layers))


def read_head_costs(path: Path, table: HeadScores) -> Float:
    """Read the costs [L, Hkv] of the heads (bytes, seconds, ...) from a CSV file: layer, kv_head, weight.

    Raises ``UserError``: the file is invalid (names file and line), a cost is not above 0, or the grid differs from the
    table's.
    """
    # Check that the file has a row for every head
    rows = read_table(path, "head costs", _WEIGHTS)
    layer = rows["layer"].to_numpy()
    head = rows["kv_head"].to_numpy()
    is_known = False
    if (layer < table.num_layers).all():
        is_known = bool((head < np.array(table.heads_per_layer)[layer]).all())
    if len(rows) != table.num_heads or not is_known:
        raise UserError(
            f"head costs {path}: the file has {len(rows)} rows, "
            f"up to layer {int(layer.max())} and KV head {int(head.max())}\n"
            f"it needs one row for every head of the density table '{table.name}', "
            f"{grid_words(table.heads_per_layer)}"
        )
    # Arrange the costs as a grid
    weights = np.full(table.grid, np.nan)
    weights[layer, head] = rows["weight"].to_numpy()
    is_absent = np.isnan(weights) & table.is_head
    if is_absent.any():
        lacking = np.argwhere(is_absent)[0][0]
        raise UserError(
            f"head costs {path}: one head is listed twice, and a head of layer {lacking} is missing"
        )
    return weights


def solve(
    table: HeadScores,
    budget: float,
    constraints: Constraints | None = None,
    weights: Float | None = None,
    *,
    robust: bool = False,
    window: int | None = None,
) -> Layout:
    """Return the layout of highest coverage whose global heads weigh at most ``budget``.

    The budget is their number, or with ``weights`` [L, Hkv], above 0, their total weight. If ``robust``, the lowest
    per-domain coverage is maximised instead of the overall one. The window defaults to the table's, or 128 tokens.

    The layout is named "constrained" or "robust"; its provenance holds the constraints, and ``gap`` if optimality was
    not proven within the time limit.

    Raises ``UserError``: no layout meets the constraints (the message names the conflicting ones), the budget is too
    small for any head, no head of a domain keeps anything, or ``weights`` do not have the table's shape.
    """
    layout = best_layout(table, budget, constraints, weights, robust=robust, window=window)
    if layout is not None and layout.num_global:
        return layout
    # Say why there is none
    constraints = _checked(table, constraints, weights)
    heads = table.heads_per_layer
    if layout is None:
        problem = integer_program.Problem(heads, constraints.named, budget, weights)
        raise UserError(_conflict(problem, constraints, budget))
    problem = integer_program.Problem(heads, constraints.named, budget, weights, at_least=1)
    least = problem.least()
    reason = "the constraints make every head local"
    if least is not None:
        reason = f"at least {least:g} is needed"
    raise UserError(
        f"no KV head can be global with budget {budget:g} and these constraints: {reason}"
    )


def best_layout(
    table: HeadScores,
    budget: float,
    constraints: Constraints | None = None,
    weights: Float | None = None,
    *,
    robust: bool = False,
    window: int | None = None,
    excluded: Sequence[Layout] = (),
    apart: int = 1,
    at_least: int = 0,
) -> Layout | None:
    """Return the best layout of ``solve``, with or without global heads; None if no layout meets the constraints.

    It differs from each of ``excluded`` in at least ``apart`` heads, and has ``at_least`` so many global ones.
    """
    # Solve the integer program
    constraints = _checked(table, constraints, weights)
    problem = integer_program.Problem(
        table.heads_per_layer,
        constraints.named,
        budget,
        weights,
        excluded=[layout.global_mask for layout in excluded],
        at_least=at_least,
        apart=apart,
    )
    best = problem.optimum(_objective(table, robust=robust))
    if best is None:
        return None
    layout = Layout.from_mask(
        best.mask,
        window=window or table.window or DEFAULT_WINDOW,
        strategy=ROBUST if robust else CONSTRAINED,
        sinks=table.sinks,
        heads_per_layer=table.heads_per_layer,
    )
    # Record constraints, costs and gap
    origin = coverage.provenance(table, layout, budget)
    origin["constraints"] = constraints.named
    if robust:
        origin["worst_domain"] = round(min(coverage.domain_coverage(table, layout).values()), 4)
    if weights is not None:
        origin["weight"] = float(weights[best.mask].sum())
    if best.gap > 1e-9:
        origin["gap"] = float(f"{best.gap:.2g}")
    return replace(layout, provenance=origin)


def _checked(
    table: HeadScores, constraints: Constraints | None, weights: Float | None
) -> Constraints:
    """Return the constraints on a table's layouts. Raises ``UserError`` if they or the weights do not fit its grid."""
    constraints = constraints or Constraints()
    constraints.check(table.grid)
    constraints = constraints.on(table)
    if weights is None:
        return constraints
    if weights.shape != table.grid or not (weights[table.is_head] > 0).all():
        raise UserError(
            f"weights must be above 0 and have shape {list(table.grid)}; "
            f"found shape {list(weights.shape)}"
        )
    return constraints


def _objective(table: HeadScores, *, robust: bool) -> Float:
    """Return the densities [P, L, Hkv] whose lowest coverage is maximised. Raises ``UserError`` if one has none."""
    density = table.density[None]
    if robust:
        density = np.stack([table.domain_density(domain) for domain in table.domains])
    for domain, kept in zip(table.domains, density, strict=False):
        if not kept.any():
            of = f"domain '{domain}'" if robust else f"density table '{table.name}'"
            raise UserError(
                f"every head density of {of} is 0 at tau = {table.tau:g}: choose a smaller tau"
            )
    return density


def _conflict(problem: integer_program.Problem, constraints: Constraints, budget: float) -> str:
    """Describe which constraints conflict, and the smallest budget that would satisfy all of them."""
    culprits = problem.conflict()
    descriptions = {"budget": f"the budget of {budget:g}"}
    for name, value in constraints.named.items():
        descriptions[name] = _option(name, value)
    message = f"no layout meets {' and '.join(descriptions[name] for name in culprits)}"
    if "budget" not in culprits:
        return message
    least = problem.least()
    if least is None:
        return message
    return f"{message}: the constraints need a budget of at least {least:g}"


def _option(name: str, value: object) -> str:
    """Return the command-line option of a constraint, with its value."""
    if name == "granularity":
        return f"--granularity {value}"
    option = f"--constraint {name.replace('_', '-')}"
    if value is True:
        return option
    if isinstance(value, list):
        value = ",".join(str(item) for item in value)
    return f"{option}={value}"
