"""What the report says: its sentences and the small tables behind its figures, all derived from the inputs.

Page and figures both draw from here, so a number on the page and in a figure is the same number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, TypeGuard

import numpy as np
import pandas as pd

from spkv_nas.artifacts.comparison import FULL_ATTENTION, SP_KV
from spkv_nas.artifacts.density import DensityTable
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.proposal.coverage import coverage, coverage_curve
from spkv_nas.proposal.stability import Certainty, bootstrap, knee
from spkv_nas.proposal.strategies import interleaved_first, interleaved_last

NUMBERS = (
    "density_percent",
    "coverage_percent",
    "nll",
    "delta_nll_percent",
    "delta_nll_standard_error",
    "num_global",
    "num_seeds",
    "steps",
)


@dataclass(frozen=True)
class Inputs:
    """Everything a report is made from, checked.

    ``comparison`` is None where nothing has been trained yet; ``coverage`` holds each layout's density coverage,
    in [0, 1]; ``summary`` is the content of ``comparison.yaml``.
    """

    table: DensityTable
    layouts: Mapping[str, Layout]
    coverage: Mapping[str, float]
    comparison: pd.DataFrame | None
    summary: Mapping[str, Any]

    @cached_property
    def certainty(self) -> Certainty | None:
        """How sure the densities are, at the budget that most layouts share, or without any at the knee."""
        resampled = bootstrap(self.table)
        if resampled is None:
            return None
        budgets = pd.Series([layout.num_global for layout in self.layouts.values()])
        budget = knee(self.table) if budgets.empty else max(1, int(budgets.mode().max()))
        return Certainty.of(resampled, self.layouts, budget)

    @classmethod
    def check(
        cls,
        table: DensityTable,
        layouts: Mapping[str, Layout],
        comparison: pd.DataFrame | None,
        summary: Mapping[str, Any] | None,
    ) -> Inputs:
        """Raises ``UserError`` for a layout of another shape than the table, or a comparison that cannot be read."""
        covered = {name: coverage(table, layout) for name, layout in layouts.items()}
        checked = None if comparison is None or comparison.empty else _check_comparison(comparison)
        return cls(table, layouts, covered, checked, summary or {})


def _check_comparison(comparison: pd.DataFrame) -> pd.DataFrame:
    """The comparison with every column there, numbers as floats (NaN where missing), texts as str."""
    if "strategy" not in comparison:
        raise UserError(
            f"comparison.csv: the column 'strategy' is missing; found {', '.join(map(str, comparison.columns))}"
        )
    checked = comparison.reset_index(drop=True)
    if checked["strategy"].isna().any():
        row = int(checked["strategy"].isna().to_numpy().argmax())
        raise UserError(f"comparison.csv line {row + 2}: the strategy has no name")
    for column in NUMBERS:
        if column not in checked:
            checked[column] = math.nan
            continue
        numbers = pd.to_numeric(checked[column], errors="coerce").astype(float)
        unreadable = (numbers.isna() & checked[column].notna()).to_numpy()
        if unreadable.any():
            row = int(unreadable.argmax())
            raise UserError(f"comparison.csv line {row + 2}: {column} is {checked[column][row]!r}; expected a number")
        checked[column] = numbers.replace([math.inf, -math.inf], math.nan)
    checked["strategy"] = checked["strategy"].astype(str)
    reference = checked["strategy"] == FULL_ATTENTION
    checked.loc[reference, "delta_nll_percent"] = checked.loc[reference, "delta_nll_percent"].fillna(0.0)
    checked["note"] = checked["note"].astype(object).fillna("").astype(str) if "note" in checked else ""
    return checked


def is_layout(comparison: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are layouts, rather than the two references (full attention, SP-KV)."""
    return ~comparison["strategy"].isin([FULL_ATTENTION, SP_KV])


def contenders(comparison: pd.DataFrame) -> pd.DataFrame:
    """Trained layouts of one budget, lowest NLL first: of several budgets, the one that most layouts share."""
    trained = comparison[is_layout(comparison) & comparison["nll"].notna()]
    budgets = trained["num_global"].dropna()
    if not budgets.empty:
        trained = trained[trained["num_global"] == budgets.mode().max()]
    return trained.sort_values("nll", kind="stable")


def widest_layout(inputs: Inputs) -> str | None:
    """The layout of highest coverage: of several budgets, at the one that most layouts share. None without layouts."""
    if not inputs.layouts:
        return None
    budgets = pd.Series({name: layout.num_global for name, layout in inputs.layouts.items()})
    rivals = budgets[budgets == budgets.mode().max()].index
    return str(max(rivals, key=lambda name: inputs.coverage[name]))


def domain_profile(table: DensityTable) -> pd.DataFrame:
    """One row per domain: mean and standard deviation over heads, tokens, documents, and agreement.

    ``agreement`` is Spearman's rank correlation of the domain's head densities with those over all domains: near 1
    the same heads are dense. NaN where the densities do not vary.
    """
    overall = pd.Series(table.density.ravel())
    rows = []
    for domain in table.domains:
        density = pd.Series(table.domain_density(domain).ravel())
        of_domain = table.rows[table.rows["domain"] == domain]
        varies = density.nunique() > 1 and overall.nunique() > 1
        rows.append(
            {
                "domain": str(domain),
                "mean": density.mean(),
                "std": density.std(ddof=0),
                "num_tokens": int(of_domain["num_tokens"].max()),
                "num_documents": int(of_domain["num_documents"].max()),
                "agreement": density.rank().corr(overall.rank()) if varies else math.nan,
            }
        )
    return pd.DataFrame(rows)


def position_profile(table: DensityTable) -> pd.DataFrame | None:
    """Density over heads by token position: columns start, end, mean, low, high (10th and 90th percentile of heads)."""
    if table.positions is None or table.positions.empty:
        return None
    buckets = table.positions.groupby(["start", "end"], sort=True)["density"]
    quantiles = buckets.quantile(np.array([0.1, 0.9])).unstack()
    profile = pd.DataFrame({"mean": buckets.mean(), "low": quantiles[0.1], "high": quantiles[0.9]})
    return profile.reset_index()


def budget_curve(table: DensityTable) -> pd.DataFrame | None:
    """Coverage in [0, 1] by budget: columns budget, densest, random, and the two layer patterns.

    The patterns spend whole layers, so they are NaN at other budgets. None where no head keeps anything.
    """
    if table.mean == 0.0:
        return None
    curve = coverage_curve(table)
    total = table.density.sum()
    for name, pattern in (("interleaved-first", interleaved_first), ("interleaved-last", interleaved_last)):
        curve[name] = math.nan
        for layers in range(1, table.num_layers + 1):
            mask = pattern(table.num_layers, table.num_kv_heads, layers * table.num_kv_heads)
            curve.loc[layers * table.num_kv_heads - 1, name] = table.density[mask].sum() / total
    return curve


def findings(inputs: Inputs) -> list[str]:
    """The report's sentences, the result first."""
    return [*_findings(inputs), *_signal(inputs.table)]


def _findings(inputs: Inputs) -> list[str]:
    if inputs.comparison is not None:
        layouts = contenders(inputs.comparison)
        if not layouts.empty:
            return [
                *_result(layouts, inputs.table),
                *_ranking(layouts),
                *_correlation(inputs.summary),
                *_reference(inputs.comparison),
            ]
    return _before_training(inputs)


def _signal(table: DensityTable) -> list[str]:
    if table.signal == "density":
        return []
    return [f"Where this page says density, the table holds another signal, {table.signal}."]


def _result(layouts: pd.DataFrame, table: DensityTable) -> list[str]:
    best = layouts.iloc[0]
    budget = (
        f" with {best['num_global']:.0f} of {table.num_heads} KV heads global"
        if not math.isnan(best["num_global"])
        else ""
    )
    rivals = f"has the lowest NLL of {len(layouts)} layouts" if len(layouts) > 1 else "is the only layout trained"
    delta = f", {versus_full(best)}" if not math.isnan(best["delta_nll_percent"]) else ""
    sentences = [f"{best['strategy']} {rivals}{budget}: {best['nll']:.4f} nats per token{delta}."]
    if len(layouts) == 1 or math.isnan(best["delta_nll_percent"]):
        return sentences
    second = layouts.iloc[1]
    lead = second["delta_nll_percent"] - best["delta_nll_percent"]
    if math.isnan(lead):
        return sentences
    error = _combined_error(best, second)
    ahead = f"The next, {second['strategy']}, is {lead:.3f} percentage points behind"
    if math.isnan(error):
        return [*sentences, f"{ahead}; no standard error is known, so the order of these two is open."]
    verdict = "more than" if lead > 2 * error else "too close to call at less than"
    noise = f"{verdict} two combined standard errors (one is {error:.3f})"
    return [*sentences, f"{ahead}, {noise}; the spread between training runs is not in these errors."]


def _ranking(layouts: pd.DataFrame) -> list[str]:
    known = layouts.dropna(subset=["coverage_percent"])
    pairs = [
        (one, other)
        for one, other in combinations([row for _, row in known.iterrows()], 2)
        if one["coverage_percent"] != other["coverage_percent"] and one["nll"] != other["nll"]
    ]
    if not pairs:
        return []
    right = [pair for pair in pairs if _agrees(*pair)]
    clear = [pair for pair in pairs if _is_clear(*pair)]
    clear_right = sum(_agrees(*pair) for pair in clear)
    widest = known.sort_values("coverage_percent", ascending=False, kind="stable").iloc[0]
    best = known.iloc[0]
    top = (
        f"It also has the highest density coverage, {widest['coverage_percent']:.1f} %"
        if best.name == widest.name == layouts.iloc[0].name
        else f"The highest density coverage, {widest['coverage_percent']:.1f} %, is that of {widest['strategy']}"
    )
    ranks = f"coverage puts {len(right)} of {len(pairs)} pairs of layouts in the order of their NLL"
    share = f"all {len(clear)}" if clear_right == len(clear) else f"{clear_right} of the {len(clear)}"
    noise = (
        f", and {share} that are more than two combined standard errors apart"
        if clear
        else ", but no pair is more than two combined standard errors apart"
    )
    return [f"{top}; {ranks}{noise}."]


def _correlation(summary: Mapping[str, Any]) -> list[str]:
    """The rank correlations recorded in ``comparison.yaml``: keys rho and, where known, layouts and interval."""
    recorded = summary.get("rank_correlation")
    if not _is_correlation(recorded):
        return []
    over = f" over {recorded['layouts']} layouts" if "layouts" in recorded else ""
    sentence = f"Spearman's rank correlation of coverage and NLL increase{over} is {_with_interval(recorded)}"
    zero_shot = summary.get("zero_shot_rank_correlation")
    if _is_correlation(zero_shot):
        sentence += f", that of the NLL increase before any training {_with_interval(zero_shot)}"
        return [f"{sentence}; {signed(-1, 0)} and {signed(1, 0)} would be perfect rankings."]
    return [f"{sentence}; {signed(-1, 0)} would be a perfect ranking."]


def _is_correlation(recorded: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(recorded, Mapping) and isinstance(recorded.get("rho"), int | float)


def _with_interval(recorded: Mapping[str, Any]) -> str:
    text, interval = signed(recorded["rho"], 2), recorded.get("interval")
    if not isinstance(interval, list | tuple) or len(interval) != 2:
        return text
    low, high = (signed(float(bound), 2) for bound in interval)
    return f"{text} (95 % interval {low} to {high})"


def _reference(comparison: pd.DataFrame) -> list[str]:
    rows = comparison[(comparison["strategy"] == SP_KV) & comparison["delta_nll_percent"].notna()]
    if rows.empty:
        return []
    row = rows.iloc[0]
    density = f" keeps {row['density_percent']:.1f} % of the tokens and" if row["density_percent"] >= 0 else ""
    return [f"SP-KV itself, which can open any head for any token,{density} is {versus_full(row)}."]


def _before_training(inputs: Inputs) -> list[str]:
    table = inputs.table
    best = widest_layout(inputs)
    if best is None:
        return [f"On average, the {table.num_heads} KV heads keep {100 * table.mean:.1f} % of the tokens."]
    layout = inputs.layouts[best]
    rivals = sum(other.num_global == layout.num_global for other in inputs.layouts.values())
    which = f"Of {rivals} layouts" if rivals > 1 else "Of the layouts"
    return [
        f"{which} with {layout.num_global} of {table.num_heads} KV heads global, {best} has the highest density "
        f"coverage: {100 * inputs.coverage[best]:.1f} %.",
        "None has been trained yet, so which has the lowest NLL is open.",
    ]


def _combined_error(one: pd.Series[Any], other: pd.Series[Any]) -> float:
    """Standard error of the difference of two deltas, taken as independent (an upper bound where they share noise)."""
    return math.hypot(one["delta_nll_standard_error"], other["delta_nll_standard_error"])


def _agrees(one: pd.Series[Any], other: pd.Series[Any]) -> bool:
    return bool((one["coverage_percent"] > other["coverage_percent"]) == (one["nll"] < other["nll"]))


def _is_clear(one: pd.Series[Any], other: pd.Series[Any]) -> bool:
    difference = abs(one["delta_nll_percent"] - other["delta_nll_percent"])
    return bool(difference > 2 * _combined_error(one, other))


def versus_full(row: pd.Series[Any]) -> str:
    """Such as "0.161 ± 0.020 % above full attention"."""
    delta, error = row["delta_nll_percent"], row["delta_nll_standard_error"]
    plus_minus = "" if math.isnan(error) else f" ± {error:.3f}"
    return f"{abs(delta):.3f}{plus_minus} % {'below' if delta < 0 else 'above'} full attention"


def signed(value: float, digits: int = 3) -> str:
    """A number with its sign, a true minus; an em dash where there is none."""
    return "—" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def number(value: float, digits: int) -> str:
    """A number, or an em dash where there is none."""
    return "—" if math.isnan(value) else f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def short(text: str, length: int) -> str:
    """``text`` on one line, unprintable characters replaced, at most ``length`` characters."""
    clean = "".join(letter if letter.isprintable() else " " for letter in text)
    return clean if len(clean) <= length else clean[: length - 1].rstrip() + "…"
