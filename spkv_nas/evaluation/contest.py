"""Compare layouts of one memory budget on text that chose none of them, and recommend the one that loses least.

What a head score predicts of a layout is an estimate to first or second order, and which estimate is right depends on
the model (reports/LOG.md). So layouts that were chosen in several ways are measured: successive halving spends most of
the text on the best of them, and errors are paired by document. The last two are measured on more text until they are
told apart.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.tried_layouts import RECOMMENDED, TRIED, TriedLayout
from spkv_nas.base import statistics
from spkv_nas.base.progress import Progress, Reporter, in_sequence
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import paired
from spkv_nas.evaluation.zero_shot import Work, zero_shot

# Blocks of the first round, in which every layout is measured; each round doubles them
FIRST_ROUND = 4
USUAL_BLOCKS = 16  # after which most contests are decided, for forecasts
# Text that is read at most: four rounds take about as long as costs of windows, and long blocks tell more
_MOST_BLOCKS = 32
_MOST_TOKENS = 65_536
# Layouts that are measured in every round, because one alone is compared with nothing
FINALISTS = 2
_EQUAL = 1.0  # layouts whose difference is within this number of standard errors count as equal
_TOLD_APART = 2.0  # standard errors of a difference from which on it is taken for one
# Percent of the NLL by which layouts need not be told apart: a tenth of the margin that is asked for most
_NEGLIGIBLE = 0.1


@dataclass(frozen=True)
class Entrant:
    """A layout that may be recommended, with what it is predicted to lose."""

    name: str
    layout: Layout
    # Loss in nats per token by the costs of windows; NaN: none is known
    predicted: float = math.nan


@dataclass(frozen=True)
class Contest:
    """The entrants of a contest and the one to recommend."""

    best: TriedLayout
    # Those that were measured on the most text first, of these the best first
    ranked: tuple[TriedLayout, ...]
    passes: float  # cost in forward passes over the text

    def record(self) -> dict[str, object]:
        """Return the entries for a record: the layouts, and the name of the one to recommend."""
        rows = [tried.as_mapping() for tried in self.ranked]
        return {TRIED: rows, RECOMMENDED: self.best.name, "contest_passes": round(self.passes, 2)}


def most_tokens(block_size: int) -> int:
    """Return the tokens of text that a contest reads at most, in blocks of ``block_size`` tokens."""
    return min(_MOST_BLOCKS * block_size, _MOST_TOKENS)


def run_contest(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    entrants: Sequence[Entrant],
    *,
    batch_size: int = 1,
    cache: Callable[[TokenBlocks], Path] | None = None,
    progress: Progress | None = None,
) -> Contest:
    """Measure layouts on unseen ``blocks`` by successive halving; must be called on all ranks.

    All are measured on the first blocks, the better half of them on as many again, and so on, until the two that lose
    least differ by more than two standard errors, or their difference is known to .1 % of the NLL. Of those that were
    measured in all rounds, the one of the smallest loss is recommended; or one with fewer windows, as engines serve
    fewer windows with less overhead, if it loses more by at most one standard error both as measured and as predicted.

    Args:
        model: any supported decoder; it is left unchanged.
        blocks: text on which no entrant was chosen; less of it is read where less decides.
        entrants: layouts under different names, at least one.
        batch_size: blocks per forward pass.
        cache: gives the folder of finished scores on a part of the text (``zero_shot.cache_folder``).
        progress: called with (passes over a block done, total of all rounds).
    """
    course = _Course.of(model, blocks, entrants, batch_size=batch_size, cache=cache)
    ends = _rounds(blocks.num_blocks)
    finalists: list[TriedLayout] = []
    left = list(entrants)
    shown = iter(in_sequence(progress, _round_passes(len(entrants), blocks.num_blocks)))
    for part, num_blocks in zip(blocks.nested(ends), ends, strict=True):
        course.measure(left, part, num_blocks, next(shown))
        # Keep the better half, unless the two best are told apart
        finalists = sorted(
            (course.measured[entrant.name] for entrant in left), key=lambda tried: tried.change
        )
        if len(finalists) <= FINALISTS and _is_decided(finalists, course.sums):
            break
        num_left = _num_left(len(left))
        left = sorted(left, key=lambda entrant: course.measured[entrant.name].change)[:num_left]
    for rest in shown:  # rounds that were not needed
        rest(1, 1)
    ordered = sorted(course.measured.values(), key=lambda tried: (-tried.blocks, tried.change))
    return Contest(_recommended(finalists, course.sums), tuple(ordered), course.passes)


@dataclass
class _Course:
    """Hold what a contest has measured so far: NLL sums by name (None: full attention), and what they cost."""

    model: PreTrainedModel
    blocks: TokenBlocks
    batch_size: int
    cache: Callable[[TokenBlocks], Path] | None
    sums: dict[str | None, paired.DocumentNLL]
    measured: dict[str, TriedLayout] = field(default_factory=dict)
    passes: float = 0.0  # forward passes over the text

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        blocks: TokenBlocks,
        entrants: Sequence[Entrant],
        *,
        batch_size: int,
        cache: Callable[[TokenBlocks], Path] | None,
    ) -> "_Course":
        """Begin a contest, in which nothing is measured yet; arguments as in ``run_contest``."""
        num_documents = len(blocks.documents)
        nothing = paired.DocumentNLL(np.zeros(num_documents), np.zeros(num_documents, np.int64))
        sums = dict.fromkeys([None, *(entrant.name for entrant in entrants)], nothing)
        return cls(model, blocks, batch_size, cache, sums)

    def measure(
        self, left: Sequence[Entrant], part: TokenBlocks, num_blocks: int, progress: Progress
    ) -> None:
        """Measure those that are left on the next part of the text, and add it to the parts before.

        ``num_blocks`` are the blocks of all parts so far.
        """
        work = Work()
        scores = zero_shot(
            self.model,
            [None, *(entrant.layout for entrant in left)],
            part,
            batch_size=self.batch_size,
            cache=None if self.cache is None else self.cache(part),
            work=work,
            reporter=Reporter.of(progress),
        )
        self.passes += work.passes * part.num_blocks / self.blocks.num_blocks
        for name, score in zip([None, *(entrant.name for entrant in left)], scores, strict=True):
            self.sums[name] = self.sums[name].plus(score)
        for entrant in left:
            self.measured[entrant.name] = _tried(
                entrant, self.sums[entrant.name], self.sums[None], num_blocks
            )


def _rounds(num_blocks: int) -> list[int]:
    """Return the number of blocks that are measured after each round."""
    return sorted(
        {min(FIRST_ROUND << times, num_blocks) for times in range(num_blocks.bit_length())}
    )


def _num_left(number: int) -> int:
    """Return how many of a round's layouts are measured in the next."""
    return min(number, max(FINALISTS, (number + 1) // 2))


def _round_passes(number: int, num_blocks: int) -> list[float]:
    """Return the passes over a block in each round, with full attention and at first ``number`` layouts."""
    passes: list[float] = []
    start = 0
    for end in _rounds(num_blocks):
        passes.append((1.0 + number) * (end - start))
        start = end
        number = _num_left(number)
    return passes


def passes_of_contest(number: int, num_blocks: int) -> float:
    """Return the passes over a block that a contest of ``number`` layouts takes."""
    return sum(_round_passes(number, num_blocks))


def _tried(
    entrant: Entrant, score: paired.DocumentNLL, full: paired.DocumentNLL, num_blocks: int
) -> TriedLayout:
    """Return an entrant with its change of NLL against full attention."""
    change = paired.paired_difference(score, full)
    return TriedLayout(
        name=entrant.name,
        layout=entrant.layout,
        predicted=100.0 * entrant.predicted / full.mean,
        change=change.percent,
        standard_error=change.standard_error,
        blocks=num_blocks,
    )


def _difference(
    tried: TriedLayout, other: TriedLayout, sums: Mapping[str | None, paired.DocumentNLL]
) -> paired.PairedDifference:
    """Return by how much a layout's NLL exceeds another's, paired by document, in percent of full attention's."""
    full = sums[None]
    ratio, error = statistics.jackknife_ratio(
        sums[tried.name].total - sums[other.name].total, full.total
    )
    return paired.PairedDifference(100.0 * float(ratio), 100.0 * float(error))


def _is_decided(
    finalists: Sequence[TriedLayout], sums: Mapping[str | None, paired.DocumentNLL]
) -> bool:
    """Return whether the two layouts that lose least are told apart, or their difference is too small to matter."""
    if len(finalists) < FINALISTS:
        return True
    best, second = finalists[:FINALISTS]
    difference = _difference(second, best, sums)
    error = _TOLD_APART * difference.standard_error
    return difference.percent > error or error < _NEGLIGIBLE


def _recommended(
    finalists: Sequence[TriedLayout], sums: Mapping[str | None, paired.DocumentNLL]
) -> TriedLayout:
    """Return the finalist of the smallest loss, or one of fewer windows that loses as little within the errors."""
    best = finalists[0]

    def equals_best(tried: TriedLayout) -> bool:
        difference = _difference(tried, best, sums)
        allowed = _EQUAL * difference.standard_error
        # False where one has no prediction
        is_predicted_worse = tried.predicted - best.predicted > allowed
        return difference.percent <= allowed and not is_predicted_worse

    equals = [tried for tried in finalists if tried is best or equals_best(tried)]
    return min(equals, key=lambda tried: (len(tried.layout.legend), tried.change))
