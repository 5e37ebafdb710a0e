"""Measure the error rates, the power and the sample sizes of the tests behind ``spkv-nas verdict``.

Run ``python reports/verdict.py``; about ten minutes of one core. Every run draws samples with replacement from real
scores that are moved to the margin, where neither answer is right. The e-processes are looked at after every sample.
Prints Markdown.

- NLL by document: the 93 held-out documents of ``reports/stdlib-21x3/comparison-documents.npz``, dense model and
  retrained layouts; also with document lengths drawn from a log-normal distribution (sigma 1), whose sums of NLL are
  heavy-tailed, and with losses that have Student's t distribution (3 degrees of freedom).
- RULER: differences of the two tasks in ``reports/ruler-micro/ruler.csv`` whose samples are right or wrong. Their means
  and standard errors determine how often both models differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr

from spkv_nas.base.console import say
from spkv_nas.base.sequential import anytime_p, betting_log_e, bounds_so_far, holm

Float = NDArray[np.float64]
ROOT = Path(__file__).resolve().parent
RISK, RUNS, BATCH = 0.05, 10_000, 200
NLL_SHARE, POINTS = 0.01, 0.02  # margins
HEAVY, TAILS = "log-normal lengths", "t losses"
Draw = Callable[[np.random.Generator, int, int], Float]  # generator, runs, samples -> gains over the margin


def documents(strategy: str, kind: str, *, distance: float, margin: float) -> Draw:
    """Return a drawer of (1 + margin) dense - candidate by document, beside the documents' sizes.

    Args:
        strategy: row of the comparison.
        kind: "", ``HEAVY`` or ``TAILS``.
        distance: true ΔNLL below the margin, in margins: 0 at the margin, 1 at no loss, -1 at twice the margin.
        margin: ΔNLL that is allowed, as a share.
    """
    with np.load(ROOT / "stdlib-21x3" / "comparison-documents.npz") as file:
        names, totals, tokens = [*file["strategy"]], file["total"], file["num_tokens"]
    dense, candidate = totals[names.index("dense")], totals[names.index(strategy)]
    if kind == HEAVY:
        dense, candidate = dense / tokens, candidate / tokens
    # Move every document's loss by the same share of its NLL, so that the corpus is exactly at the target
    candidate = candidate + (1.0 + margin * (1.0 - distance) - candidate.sum() / dense.sum()) * dense
    spread = (candidate - dense).std()

    def draw(random: np.random.Generator, runs: int, number: int) -> Float:
        chosen = random.integers(len(dense), size=(runs, number))
        gain = (1.0 + margin) * dense[chosen] - candidate[chosen]
        if kind == TAILS:
            gain = margin * distance * dense.mean() + spread * random.standard_t(3, size=chosen.shape) / 3**0.5
        lengths = random.lognormal(0.0, 1.0, size=chosen.shape) if kind == HEAVY else 1.0
        return np.stack([gain, dense[chosen]]) * lengths

    return draw


def answers(variant: str, *, distance: float, margin: float) -> Draw:
    """Return a drawer of differences in {-1, 0, 1} plus the margin, with the discordance of a variant's answers."""
    rows = pd.read_csv(ROOT / "ruler-micro" / "ruler.csv")
    rows = rows[(rows["variant"] == variant) & rows["task"].isin(["niah_single_1", "niah_multikey_1"])]
    discordance = (rows["difference_standard_error"] ** 2 * (rows["num_samples"] - 1) + rows["difference"] ** 2).mean()
    mean = -margin * (1.0 - distance)
    better, worse = max(discordance + mean, 0.0) / 2, (max(discordance, -mean) - mean) / 2

    def draw(random: np.random.Generator, runs: int, number: int) -> Float:
        uniform = random.random((runs, number))
        difference = np.where(uniform < better, 1.0, np.where(uniform < better + worse, -1.0, 0.0))
        return np.stack([difference + margin, np.ones_like(difference)])

    return draw


def by_documents(drawn: Float, sign: float = 1.0) -> Float:
    """Return the log e-process of NLL by document, that it passes or (sign -1) that it fails."""
    gain, size = drawn
    return betting_log_e(sign * gain, bounds_so_far(gain, size))


def by_answers(drawn: Float, sign: float = 1.0) -> Float:
    """Return the log e-process of answers, that they pass or (sign -1) that they fail."""
    return betting_log_e(sign * drawn[0], 1.0 - sign * POINTS)


def stops(draw: Draw, log_e: Callable[[Float], Float], number: int, *, runs: int = RUNS, seed: int = 0) -> Float:
    """Return [runs], the samples at which a run passes; infinity if it does not."""
    random, found = np.random.default_rng(seed), []
    for _ in range(0, runs, BATCH):
        passed = log_e(draw(random, BATCH, number)) >= -np.log(RISK)
        found.append(np.where(passed.any(-1), passed.argmax(-1) + 1.0, np.inf))
    return np.concatenate(found)


def fixed_power(draw: Draw, number: int, *, runs: int = 4000, seed: int = 1) -> float:
    """Return how often the one-sided paired t-test of ``number`` samples, at the same risk, passes."""
    values = draw(np.random.default_rng(seed), runs, number)[0]
    error = values.std(-1, ddof=1) / np.sqrt(number)
    t = values.mean(-1) / np.where(error > 0, error, np.inf)
    return float((stdtr(number - 1, t) >= 1.0 - RISK).mean())


def settings() -> Iterator[tuple[str, Callable[[float], Draw], Callable[..., Float], int]]:
    """Yield (name, drawer by distance, log e-process, samples of a run)."""
    strategies = ("full-attention", "head-gates", "densest", "interleaved-last")
    for strategy, kind in (*product(strategies, ("", HEAVY)), ("head-gates", TAILS)):
        draw = partial(_documents, strategy, kind)
        yield f"NLL, {strategy}{kind and f', {kind}'}", draw, by_documents, 300
    for variant in ("head-gates", "sp-kv"):
        yield f"RULER answers, {variant}", partial(_answers, variant), by_answers, 1000


def _documents(strategy: str, kind: str, distance: float) -> Draw:
    return documents(strategy, kind, distance=distance, margin=NLL_SHARE)


def _answers(variant: str, distance: float) -> Draw:
    return answers(variant, distance=distance, margin=POINTS)


def errors() -> None:
    """Print how often candidates at the margin pass or fail at any sample, and the fixed-sample test's errors."""
    say(f"## Wrong answers at the margin, {RUNS:,} runs, risk {100 * RISK:g} %\n")
    say("| criterion | looks | passes % | fails % | fixed-sample t-test at the end passes % |\n|---|---|---|---|---|")
    for name, make, log_e, number in settings():
        wrong = [np.isfinite(stops(make(0.0), partial(log_e, sign=sign), number)).mean() for sign in (1.0, -1.0)]
        cells = " | ".join(f"{100 * share:.2f}" for share in wrong)
        say(f"| {name} | {number} | {cells} | {100 * fixed_power(make(0.0), number, runs=RUNS):.2f} |")


def power() -> None:
    """Print power against the fixed-sample test at equal n, and the samples that clear cases take."""
    say("\n## Power and samples, 1,000 runs\n")
    say(
        "n: samples at which the fixed-sample t-test passes 90 % of candidates without loss (distance 1, by the normal "
        "approximation). Median: samples at which the sequential test stops; in brackets as a share of n.\n"
    )
    say(
        "| criterion | n | power at n %, sequential | fixed | median at distance 1 | 2 | 4 |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, make, log_e, _ in settings():
        if "interleaved" in name:  # thousands of documents
            continue
        sample = make(1.0)(np.random.default_rng(2), 50, 2000)[0]
        size = (ndtri(1 - RISK) + ndtri(0.9)) * sample.std() / sample.mean()
        number = int(np.ceil(size**2)) + 2
        stopped = {
            distance: stops(make(distance), log_e, min(6 * max(number, 40), 1500), runs=1000, seed=3)
            for distance in (1.0, 2.0, 4.0)
        }
        medians = " | ".join(f"{np.median(each):.0f} ({np.median(each) / number:.2f})" for each in stopped.values())
        sequential, fixed = (stopped[1.0] <= number).mean(), fixed_power(make(1.0), number)
        say(f"| {name} | {number} | {100 * sequential:.0f} | {100 * fixed:.0f} | {medians} |")


def campaigns(number: int = 1000, finalists: int = 10, samples: int = 300) -> None:
    """Print how often any of ten finalists at the margin passes, with Holm's correction and without."""
    wrong = uncorrected = 0
    draw = _documents("head-gates", "", 0.0)
    random = np.random.default_rng(4)
    for _ in range(number):
        p = anytime_p(by_documents(draw(random, finalists, samples)))[:, -1]
        wrong += any(holm(p.tolist(), RISK))
        uncorrected += bool((p <= RISK).any())
    say(f"\n## {number:,} campaigns of {finalists} finalists at the margin, {samples} documents each\n")
    say(f"Any finalist passes: {100 * wrong / number:.1f} % with Holm, {100 * uncorrected / number:.1f} % without.")


if __name__ == "__main__":
    errors()
    power()
    campaigns()
