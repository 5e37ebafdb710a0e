"""Measure the error rates, the power and the sample sizes of the tests behind ``spkv-nas verdict``.

Run ``python reports/verdict.py``; about fifteen minutes of one core. Every run draws samples with replacement from real
scores that are moved to the margin, where neither answer is right. The e-processes are looked at after every sample.
Prints Markdown. ``python reports/verdict.py measure`` measures the scores of ``verdict-scores.npz`` again;
``python reports/verdict.py written 1000`` simulates only written answers and recall, in a few seconds for 1,000 runs;
``python reports/verdict.py errors kld`` prints the error rates of the criteria that begin so, in 1,000 runs.

- NLL by document: the 93 held-out documents of ``reports/stdlib-21x3/comparison-documents.npz``, dense model and
  retrained layouts; also with document lengths drawn from a log-normal distribution (sigma 1), whose sums of NLL are
  heavy-tailed, and with losses that have Student's t distribution (3 degrees of freedom).
- RULER: differences of the two tasks in ``reports/ruler-micro/ruler.csv`` whose samples are right or wrong. Their means
  and standard errors determine how often both models differ.
- Rare losses: full attention by document, with the whole loss in a random share of the documents. No test without a
  bound on a document's loss holds there.
- The other criteria: 240 samples each of two layouts on the embedded model, without retraining, in
  ``reports/stdlib-21x3/verdict-scores.npz``. NLL sums of key tokens are moved as NLL by document is; scores from 0 to 1
  are moved by replacing the candidate's, at random, by the dense model's, by 0, or by 1.
- Written answers and recall: drawn scores of models that are often, or seldom, right, moved in the same way.
- KL divergence: log-normal means of documents (sigma .5 to 1.5), and one in a twentieth of the documents, scaled until
  the mean of what counts, or the mean without the clip, is at the margin. Other top tokens: shares with beta
  distributions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr

from spkv_nas.artifacts.displacement import CLIP
from spkv_nas.base.console import say
from spkv_nas.base.statistics import anytime_p, betting_log_e, bounds_so_far, holm
from spkv_nas.evaluation.verdict.criterion import MeanDivergence

Float = NDArray[np.float64]
ROOT = Path(__file__).resolve().parent
SCORES = ROOT / "stdlib-21x3" / "verdict-scores.npz"
RISK, RUNS, BATCH = 0.05, 10_000, 200
NLL_SHARE, POINTS = 0.01, 0.02  # margins of NLL and of RULER
# Margins of the others
MARGINS = {
    "longppl": 0.05,
    "tasks": 0.02,
    "agreement": 0.05,
    "acceptance": 0.1,
}
DIVERGENCE, OTHER_TOPS = 0.02, 0.05  # margins in nats, and as a share of the tokens
LAYOUTS, SAMPLES = ("head-gates", "densest"), 240
HEAVY, TAILS = "log-normal lengths", "t losses"
# Generator, runs, samples -> gains over the margin
Draw = Callable[[np.random.Generator, int, int], Float]


@dataclass(frozen=True)
class Setting:
    """A criterion with the scores of one candidate.

    Attributes:
        name: name in the tables.
        make: drawer by distance: how far the true loss is below the margin, in margins (0 at the margin, 1 at no loss).
        log_e: log e-process of what was drawn, that it passes or (sign -1) that it fails.
        looks: samples of a run.
        distances: clear cases; a loss that cannot be negative has none beyond 1.
    """

    name: str
    make: Callable[[float], Draw]
    log_e: Callable[..., Float]
    looks: int
    distances: tuple[float, float, float] = (1.0, 2.0, 4.0)


def comparison_documents(strategy: str) -> tuple[Float, Float, Float]:
    """Return the NLL sums by document of the dense model and of a row of the comparison, and the numbers of tokens."""
    with np.load(ROOT / "stdlib-21x3" / "comparison-documents.npz") as file:
        names, totals, tokens = [*file["strategy"]], file["total"], file["num_tokens"]
    return totals[names.index("dense")], totals[names.index(strategy)], tokens


def documents(
    source: tuple[Float, Float, Float], kind: str, margin: float, distance: float
) -> Draw:
    """Return a drawer of (1 + margin) dense - candidate by document, beside the documents' sizes.

    Args:
        source: NLL sums of the dense model and the candidate, and numbers of tokens.
        kind: "", ``HEAVY`` or ``TAILS``.
        margin: ΔNLL that is allowed, as a share.
        distance: as in ``Setting``.
    """
    dense, candidate, tokens = source
    if kind == HEAVY:
        dense, candidate = dense / tokens, candidate / tokens
    # Move every document's loss by the same share of its NLL, so that the corpus is exactly at the target
    candidate = (
        candidate + (1.0 + margin * (1.0 - distance) - candidate.sum() / dense.sum()) * dense
    )
    spread = (candidate - dense).std()

    def draw(random: np.random.Generator, runs: int, number: int) -> Float:
        chosen = random.integers(len(dense), size=(runs, number))
        gain = (1.0 + margin) * dense[chosen] - candidate[chosen]
        if kind == TAILS:
            gain = (
                margin * distance * dense.mean()
                + spread * random.standard_t(3, size=chosen.shape) / 3**0.5
            )
        lengths = random.lognormal(0.0, 1.0, size=chosen.shape) if kind == HEAVY else 1.0
        return np.stack([gain, dense[chosen]]) * lengths

    return draw


def rare(source: tuple[Float, Float, Float], margin: float, share: float) -> Draw:
    """Return a drawer as ``documents`` does, at the margin, with the loss in a share of the documents."""
    common = documents(source, "", margin, 1.0)

    def draw(random: np.random.Generator, runs: int, number: int) -> Float:
        gain, size = common(random, runs, number)
        return np.stack([gain - (random.random(gain.shape) < share) * margin / share * size, size])

    return draw


def answers(variant: str, distance: float, margin: float = POINTS) -> Draw:
    """Return a drawer of differences in {-1, 0, 1} plus the margin, with the discordance of a variant's answers."""
    rows = pd.read_csv(ROOT / "ruler-micro" / "ruler.csv")
    rows = rows[
        (rows["variant"] == variant) & rows["task"].isin(["niah_single_1", "niah_multikey_1"])
    ]
    discordance = (
        rows["difference_standard_error"] ** 2 * (rows["num_samples"] - 1) + rows["difference"] ** 2
    ).mean()
    mean = -margin * (1.0 - distance)
    better, worse = max(discordance + mean, 0.0) / 2, (max(discordance, -mean) - mean) / 2

    def draw(random: np.random.Generator, runs: int, number: int) -> Float:
        uniform = random.random((runs, number))
        difference = np.where(uniform < better, 1.0, np.where(uniform < better + worse, -1.0, 0.0))
        return np.stack([difference + margin, np.ones_like(difference)])

    return draw


def shares(pairs: Float, margin: float, distance: float) -> Draw:
    """Return a drawer of candidate - dense + margin, of scores [n, 2] from 0 to 1 that are moved to the distance."""
    loss, target = (pairs[:, 1] - pairs[:, 0]).mean(), margin * (1.0 - distance)
    # Replace some of the candidate's scores by others with which the loss would be beyond the target
    others = next(
        each
        for each in (pairs[:, 1], np.zeros(len(pairs)), np.ones(len(pairs)))
        if min(loss, (pairs[:, 1] - each).mean())
        <= target
        <= max(loss, (pairs[:, 1] - each).mean())
    )
    probability = (loss - target) / (loss - (pairs[:, 1] - others).mean())

    def draw(random: np.random.Generator, runs: int, number: int) -> Float:
        chosen = random.integers(len(pairs), size=(runs, number))
        is_replaced = random.random(chosen.shape) < probability
        candidate = np.where(is_replaced, others[chosen], pairs[chosen, 0])
        return np.stack([candidate - pairs[chosen, 1] + margin, np.ones_like(candidate)])

    return draw


def written(random: np.random.Generator, number: int = 2000) -> Iterator[tuple[str, float, Float]]:
    """Yield name, margin and drawn scores [n, 2] of a candidate and the dense model, by criterion.

    Answers are right or wrong, or have a share of the dense model's own; conversations about needles find none, half or
    all of the numbers; passages are recalled in part.
    """
    differs = random.random(number) < 0.2
    for rate in (0.7, 0.3):
        dense = (random.random(number) < rate).astype(np.float64)
        candidate = np.where(differs, random.random(number) < rate - 0.1, dense)
        yield f"answers, {100 * rate:.0f} % right", 0.05, np.stack([candidate, dense], 1)
    same = np.where(random.random(number) < 0.8, 1.0, random.random(number))
    yield "answers, the dense model's own", 0.05, np.stack([same, np.ones(number)], 1)
    for rate in (0.95, 0.65):
        is_found = random.random((number, 2)) < rate
        is_lost = random.random((number, 2)) < 0.1
        pairs = np.stack([(is_found & ~is_lost).mean(1), is_found.mean(1)], 1)
        yield f"needles, {100 * rate:.0f} % found", 0.05, pairs
    recalled = random.beta(1.0, 1.0, number)
    changed = np.clip(recalled + random.normal(-0.05, 0.15, number), 0.0, 1.0)
    yield "recall, half recalled", 0.1, np.stack([changed, recalled], 1)


def written_errors(runs: int, looks: int = 400) -> None:
    """Print how often candidates at the margin pass or fail at any sample, by written answers and recall."""
    say(
        f"## Wrong answers at the margin, {runs:,} runs of {looks} samples, risk {100 * RISK:g} %\n"
    )
    say("| criterion | passes % | fails % |\n|---|---|---|")
    for name, margin, pairs in written(np.random.default_rng(5)):
        draw = shares(pairs, margin, 0.0)
        wrong = []
        for sign in (1.0, -1.0):
            log_e = partial(by_shares, sign=sign, margin=margin)
            wrong.append(np.isfinite(stops(draw, log_e, looks, runs=runs)).mean())
        say(f"| {name}, margin {100 * margin:g} | {100 * wrong[0]:.1f} | {100 * wrong[1]:.1f} |")
    # A candidate with the dense model's scores gains the margin at every sample
    needed = []
    for margin in (0.02, 0.05, 0.1):
        gains = np.full((1, 300), margin)
        passed = by_shares(np.stack([gains, gains]), margin=margin)[0] >= -np.log(RISK)
        needed.append(f"{passed.argmax() + 1} at {100 * margin:g} points")
    say(f"\nEqual scores pass after {', '.join(needed)}.")


def divergences(source: Draw, clip: float, margin: float, distance: float) -> Draw:
    """Return a drawer of margin - divergence, from divergences that are scaled to the distance.

    ``clip`` is the number of margins that a sample counts at most in the mean that is at the margin; infinity: no clip.
    """
    sample = source(np.random.default_rng(5), 1, 1_000_000)[0]
    target = margin * (1.0 - distance)
    scale = target / sample.mean()
    for _ in range(100):
        counted = np.minimum(scale * sample, clip * margin).mean()
        scale *= target / counted if target else 0.0

    def draw(random: np.random.Generator, runs: int, number: int) -> Float:
        drawn = scale * source(random, runs, number)
        return np.stack([margin - drawn, np.ones_like(drawn)])

    return draw


def log_normal(sigma: float, random: np.random.Generator, runs: int, number: int) -> Float:
    """Draw log-normal means of documents."""
    return random.lognormal(0.0, sigma, (runs, number))


def in_a_twentieth(random: np.random.Generator, runs: int, number: int) -> Float:
    """Draw losses of a twentieth of the documents; the others have none."""
    drawn: Float = (random.random((runs, number)) < 0.05).astype(np.float64)
    return drawn


def other_tops(spread: float, distance: float) -> Draw:
    """Return a drawer of margin - share, of beta-distributed shares of tokens; 1 / ``spread`` is their first shape."""
    mean = OTHER_TOPS * (1.0 - distance)

    def draw(random: np.random.Generator, runs: int, number: int) -> Float:
        size = (runs, number)
        shares = np.zeros(size)
        if mean:
            shares = random.beta(1.0 / spread, (1.0 / mean - 1.0) / spread, size)
        return np.stack([OTHER_TOPS - shares, np.ones(size)])

    return draw


def by_divergence(drawn: Float, sign: float = 1.0, *, margin: float) -> Float:
    """Return the log e-process of divergences, that it passes or (sign -1) that it fails."""
    test = MeanDivergence()
    tested = [
        test.evidence(np.stack([losses, np.zeros_like(losses)], 1), margin)
        for losses in margin - drawn[0]
    ]
    return np.stack([each.passes if sign > 0 else each.fails for each in tested])


def by_documents(drawn: Float, sign: float = 1.0) -> Float:
    """Return the log e-process of NLL by document, that it passes or (sign -1) that it fails."""
    gain, size = drawn
    return betting_log_e(sign * gain, bounds_so_far(gain, size))


def by_shares(drawn: Float, sign: float = 1.0, *, margin: float, highest: float = 1.0) -> Float:
    """Return the log e-process of scores from 0 to 1, whose gain is at most ``highest`` above the margin."""
    return betting_log_e(sign * drawn[0], 1.0 - margin if sign > 0 else highest + margin)


def stops(
    draw: Draw, log_e: Callable[[Float], Float], number: int, *, runs: int = RUNS, seed: int = 0
) -> Float:
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


def settings() -> Iterator[Setting]:
    """Yield the criteria with the candidates that each is simulated with."""
    strategies = ("full-attention", "head-gates", "densest", "interleaved-last")
    for strategy, kind in (*product(strategies, ("", HEAVY)), ("head-gates", TAILS)):
        make = partial(documents, comparison_documents(strategy), kind, NLL_SHARE)
        yield Setting(f"NLL, {strategy}{kind and f', {kind}'}", make, by_documents, 300)
    for variant in ("head-gates", "sp-kv"):
        yield Setting(
            f"RULER answers, {variant}",
            partial(answers, variant),
            partial(by_shares, margin=POINTS),
            1000,
        )
    with np.load(SCORES) as file:
        scores = {name: file[name] for name in file}
    log_e = partial(by_divergence, margin=DIVERGENCE)
    sources: dict[str, Draw] = {"a twentieth": in_a_twentieth}
    for sigma in (0.5, 1.0, 1.5):
        sources[f"log-normal {sigma:g}"] = partial(log_normal, sigma)
    for name, divergence in sources.items():
        for clip, words in ((CLIP, ""), (np.inf, ", mean without the clip")):
            # At most half of the margin counts
            if divergence is in_a_twentieth and clip == CLIP:
                continue
            make = partial(divergences, divergence, clip, DIVERGENCE)
            yield Setting(f"kld, {name}{words}", make, log_e, 300, (0.5, 0.75, 1.0))
    log_e = partial(by_shares, margin=OTHER_TOPS, highest=0.0)
    for spread in (0.5, 1.0, 4.0):
        make = partial(other_tops, spread)
        yield Setting(f"same-top, beta {1.0 / spread:g}", make, log_e, 300, (0.5, 0.75, 1.0))
    for (criterion, margin), layout in product(MARGINS.items(), LAYOUTS):
        name, pairs = f"{criterion}, {layout}", scores[f"{criterion}/{layout}"]
        if criterion == "longppl":
            source = pairs[:, 1], pairs[:, 0], np.ones(len(pairs))
            yield Setting(name, partial(documents, source, "", margin), by_documents, 300)
        elif criterion == "tasks":
            yield Setting(
                name, partial(shares, pairs, margin), partial(by_shares, margin=margin), 1000
            )
        else:  # the dense model's own scores are 1
            log_e = partial(by_shares, margin=margin, highest=0.0)
            yield Setting(name, partial(shares, pairs, margin), log_e, 300, (0.5, 0.75, 1.0))


def errors(beginning: str = "", runs: int = RUNS) -> None:
    """Print how often candidates at the margin pass or fail at any sample, and the fixed-sample test's errors."""
    say(f"## Wrong answers at the margin, {runs:,} runs, risk {100 * RISK:g} %\n")
    say(
        "| criterion | looks | passes % | fails % | fixed-sample t-test at the end passes % |\n|---|---|---|---|---|"
    )
    for each in settings():
        if not each.name.startswith(beginning):
            continue
        draw, number = each.make(0.0), each.looks
        wrong = [
            np.isfinite(stops(draw, partial(each.log_e, sign=sign), number, runs=runs)).mean()
            for sign in (1.0, -1.0)
        ]
        cells = " | ".join(f"{100 * share:.2f}" for share in wrong)
        say(
            f"| {each.name} | {number} | {cells} | {100 * fixed_power(draw, number, runs=runs):.2f} |"
        )


def rare_losses() -> None:
    """Print how often a candidate passes by NLL whose loss is at the margin, but in few documents."""
    say("\n## Loss at the margin in a share of the documents, NLL\n")
    say(
        "| documents with the loss % | passes % at any of 300 looks | t-test of 50 | of 300 |\n|---|---|---|---|"
    )
    for share in (0.2, 0.1, 0.05, 0.02, 0.01):
        draw = rare(comparison_documents("full-attention"), NLL_SHARE, share)
        wrong = [np.isfinite(stops(draw, by_documents, 300)).mean()]
        wrong += [fixed_power(draw, number, runs=RUNS) for number in (50, 300)]
        say(f"| {100 * share:g} | " + " | ".join(f"{100 * rate:.1f}" for rate in wrong) + " |")


def power() -> None:
    """Print power against the fixed-sample test at equal n, and the samples that clear cases take."""
    say("\n## Power and samples, 1,000 runs\n")
    say(
        "Distance: how far the true loss is below the margin, in margins (1: no loss). n: samples at which the "
        "fixed-sample t-test passes 90 % of candidates at the first distance, by the normal approximation. Median: "
        "samples at which the sequential test stops; in brackets as a share of n.\n"
    )
    say(
        "| criterion | distances | n | power at n %, sequential | fixed | median at the first distance | second | "
        "third |\n|---|---|---|---|---|---|---|---|"
    )
    for each in settings():
        # Thousands of documents, or no mean that the test knows
        if "interleaved" in each.name or "twentieth" in each.name or "clip" in each.name:
            continue
        draw = each.make(each.distances[0])
        sample = draw(np.random.default_rng(2), 50, 2000)[0]
        size = (ndtri(1 - RISK) + ndtri(0.9)) * sample.std() / sample.mean()
        number = int(np.ceil(size**2)) + 2
        longest = min(6 * max(number, 40), 1500)
        stopped = [
            stops(each.make(distance), each.log_e, longest, runs=1000, seed=3)
            for distance in each.distances
        ]
        medians = " | ".join(
            f"{np.median(stop):.0f} ({np.median(stop) / number:.2f})" for stop in stopped
        )
        sequential, fixed = (stopped[0] <= number).mean(), fixed_power(draw, number)
        distances = ", ".join(f"{distance:g}" for distance in each.distances)
        say(
            f"| {each.name} | {distances} | {number} | {100 * sequential:.0f} | {100 * fixed:.0f} | {medians} |"
        )


def campaigns(number: int = 1000, finalists: int = 10, samples: int = 300) -> None:
    """Print how often any of ten finalists at the margin passes, with Holm's correction and without."""
    wrong = uncorrected = 0
    draw = documents(comparison_documents("head-gates"), "", NLL_SHARE, 0.0)
    random = np.random.default_rng(4)
    for _ in range(number):
        p = anytime_p(by_documents(draw(random, finalists, samples)))[:, -1]
        wrong += any(holm(p.tolist(), RISK))
        uncorrected += bool((p <= RISK).any())
    say(
        f"\n## {number:,} campaigns of {finalists} finalists at the margin, {samples} documents each\n"
    )
    say(
        f"Any finalist passes: {100 * wrong / number:.1f} % with Holm, {100 * uncorrected / number:.1f} % without."
    )


def measure() -> None:
    """Measure the scores of ``verdict-scores.npz``: layouts on the embedded model, text of the installed packages."""
    from spkv_nas.base.files import write_npz
    from spkv_nas.base.progress import SILENT
    from spkv_nas.stages.decision import prepare
    from spkv_nas.stages.options.verdict import VerdictOptions
    from spkv_nas.stages.verdict import contenders

    files = [str(ROOT.parent / "layouts" / "stdlib-21x3" / f"{layout}.yaml") for layout in LAYOUTS]
    words = {"tasks": ":names=stdlib_completions"}  # options of criteria
    margins = [f"{name}={100 * margin:g}{words.get(name, '')}" for name, margin in MARGINS.items()]
    options = VerdictOptions(
        candidates=files, margin=",".join(margins), data=["installed"], name="verdict-scores"
    )
    candidates = contenders(files, options.model, SILENT)
    trial = prepare(options, candidates, [], SILENT).trial
    dense = trial.store.contender
    scores = {}
    for criterion, rounds in trial.samples.items():
        for candidate in candidates:
            number, pairs = 0, np.empty((0, 2))
            while len(pairs) < SAMPLES and number < rounds.num_rounds:
                number += 1
                pairs = np.stack(
                    [trial.store.score(each, rounds, number) for each in (candidate, dense)], 1
                )
                say(f"{criterion}, {candidate.name}: {len(pairs)} samples")
            scores[f"{criterion}/{candidate.name}"] = pairs[:SAMPLES]
    write_npz(SCORES, scores)


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    elif sys.argv[1:2] == ["written"]:
        written_errors(int(sys.argv[2]))
    elif sys.argv[1:2] == ["errors"]:
        errors(sys.argv[2], 1000)
    else:
        errors()
        rare_losses()
        power()
        campaigns()
        written_errors(RUNS)
