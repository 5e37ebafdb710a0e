"""Define what a criterion of a verdict is: its samples, measured in rounds, and the test of the loss on them.

A criterion is an entry of a registry (``base.registry``), whose fields are its options: ``--margin rank=2:most=100``
sets the option ``most`` of a criterion ``rank``. ``criteria.py`` lists the built-in ones; a package adds its own by an
entry point (see "Extend spkv-nas" in the documentation). The command line imports all of them, so a criterion imports
torch inside its methods.

Samples are measured in a random order that is the same for every model, each with both models. A round is the unit that
is stored: an interrupted verdict resumes after the last finished one, and gives the same answer. So rounds must not
depend on the machine. Where samples depend on the dense model, such as continuations that it writes, it prepares each
round once for all candidates, and that is stored too. After every sample, a test gives the evidence for both answers:
that the candidate's loss is below the margin, and that it is above.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.displacement import CLIP
from spkv_nas.base import arrays, progress, registry, statistics
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.data.blocks import TokenBlocks

Float = arrays.Float
Prepared = Mapping[str, NDArray[Any]]  # arrays of a round that the dense model prepared, by name
# Scores of the dense model on the first rounds, by their number
DenseScore = Callable[[int], Float]
# By name of a detail: that of each measured round, of a candidate and of the dense model
Details = Callable[[str], tuple[Sequence[NDArray[Any]], Sequence[NDArray[Any]]]]
NO_SCORE = -1.0  # of a sample that turns out to have none
SCORE = arrays.Array("score", "number", "samples", low=-1.0)  # of a round, in its file
# Sum of the NLL and number of tokens, by position
POSITIONS = arrays.Array("positions", "number", "ranges columns")
_BISECTIONS = 40
# Times the samples, tried one after another; extrapolation beyond that means nothing
_REPEATS = (
    4,
    20,
    100,
)


@dataclass(frozen=True)
class Evidence:
    """Logarithms [n] of two e-processes after each sample: that the loss is below the margin, and that it is above."""

    passes: Float
    fails: Float

    @property
    def p_passes(self) -> float:
        """Return the anytime-valid p-value of "the loss is at least the margin"; 1 without samples."""
        return float(statistics.anytime_p(self.passes)[-1]) if len(self.passes) else 1.0

    @property
    def p_fails(self) -> float:
        """Return the anytime-valid p-value of "the loss is at most the margin"; 1 without samples."""
        return float(statistics.anytime_p(self.fails)[-1]) if len(self.fails) else 1.0


class PairedTest(ABC):
    """Test of a loss that is measured on the same samples with both models.

    Pairs are float64 [n, 2]: what the candidate and the baseline scored, in random order of the samples. A positive
    loss means that the candidate is worse. Losses and margins have a unit, and losses are between ``lowest`` and
    ``highest``.
    """

    unit: ClassVar[str]
    lowest: ClassVar[float] = -math.inf
    highest: ClassVar[float] = math.inf

    @abstractmethod
    def loss(self, pairs: Float) -> float:
        """Return the loss on these samples."""

    @abstractmethod
    def evidence(self, pairs: Float, margin: float) -> Evidence:
        """Return the evidence after each sample."""

    def num_clipped(self, pairs: Float, margin: float) -> int | None:
        """Return how many samples lose more than the test counts; None for a test that counts all of a loss."""
        return None


class RelativeRise(PairedTest):
    """Test of the rise of a ratio of sums, such as NLL per token, in percent of the baseline's.

    The samples are documents, with the sum of the NLL of their tokens: c for the candidate, d for the baseline. The
    loss is that of the whole corpus, 100 (sum c / sum d - 1), as ``score`` reports it: documents count by their length.
    It is below the margin if the mean of (1 + margin / 100) d - c over documents is above 0. That is linear in the
    samples, so no ratio has to be approximated. Documents are assumed to be independent draws from the text that the
    model is going to be used on. Their losses have no bound, so each is bounded by those before it.
    """

    unit = "%"

    def loss(self, pairs: Float) -> float:
        """Return the change of the ratio in percent; NaN without samples."""
        candidate, baseline = pairs.sum(0)
        return float(100.0 * (candidate / baseline - 1.0)) if baseline > 0.0 else math.nan

    def evidence(self, pairs: Float, margin: float) -> Evidence:
        """Return the evidence after each document."""
        gain = (1.0 + margin / 100.0) * pairs[:, 1] - pairs[:, 0]
        bounds = statistics.bounds_so_far(gain, pairs[:, 1])
        return Evidence(
            statistics.betting_log_e(gain, bounds), statistics.betting_log_e(-gain, bounds)
        )


class MeanDrop(PairedTest):
    """Test of the drop of a mean of scores in [0, 1], in percentage points. Exact for any distribution."""

    unit = "points"
    lowest = -100.0
    highest = 100.0

    def loss(self, pairs: Float) -> float:
        """Return the drop of the mean in points; NaN without samples."""
        return float(100.0 * (pairs[:, 1] - pairs[:, 0]).mean()) if len(pairs) else math.nan

    def evidence(self, pairs: Float, margin: float) -> Evidence:
        """Return the evidence after each sample."""
        if pairs.size and not (pairs.min() >= 0.0 and pairs.max() <= 1.0):
            raise ValueError(f"scores are {pairs.min()} to {pairs.max()}; expected 0 to 1")
        allowed = margin / 100.0
        gain = pairs[:, 0] - pairs[:, 1] + allowed  # in [-1 + allowed, 1 + allowed]
        return Evidence(
            statistics.betting_log_e(gain, 1.0 - allowed),
            statistics.betting_log_e(-gain, 1.0 + allowed),
        )


class MeanShortfall(MeanDrop):
    """Test of how far a mean of scores in [0, 1] is below 1, the baseline's own score; exact for any distribution.

    The candidate cannot score above the baseline, so a loss above the margin shows in far fewer samples than by
    ``MeanDrop``.
    """

    lowest = 0.0

    def evidence(self, pairs: Float, margin: float) -> Evidence:
        """Return the evidence after each sample."""
        passes = super().evidence(pairs, margin).passes
        if margin <= 0.0:  # no mean is above 1, so any loss is at least the margin
            return Evidence(passes, np.full(len(pairs), math.inf))
        allowed = margin / 100.0
        return Evidence(passes, statistics.betting_log_e(1.0 - pairs[:, 0] - allowed, allowed))


class MeanDivergence(PairedTest):
    """Test of a mean of non-negative losses without an upper bound, such as divergences; the baseline loses nothing.

    A sample counts at most ``CLIP`` margins, so the test is exact for the mean of what counts, whatever the
    distribution. That is at most the loss: a candidate that fails loses more than the margin, clipped or not. A
    candidate passes only where the loss, without the clip, is below the margin on the samples so far, too.
    """

    unit = "nats"
    lowest = 0.0

    def loss(self, pairs: Float) -> float:
        """Return the mean, without the clip; NaN without samples."""
        return float(pairs[:, 0].mean()) if len(pairs) else math.nan

    def evidence(self, pairs: Float, margin: float) -> Evidence:
        """Return the evidence after each sample."""
        losses = pairs[:, 0]
        if margin <= 0.0:  # no mean is below 0, so any loss is at least the margin
            return Evidence(np.full(len(pairs), -math.inf), np.full(len(pairs), math.inf))
        gain = margin - np.minimum(losses, CLIP * margin)
        mean = losses.cumsum() / np.arange(1, len(losses) + 1)
        passes = statistics.betting_log_e(gain, (CLIP - 1.0) * margin)
        return Evidence(
            passes=np.where(mean < margin, passes, -math.inf),
            fails=statistics.betting_log_e(-gain, margin),
        )

    def num_clipped(self, pairs: Float, margin: float) -> int:
        """Return how many samples lose more than ``CLIP`` margins."""
        return int((pairs[:, 0] > CLIP * margin).sum())


def loss_interval(
    test: PairedTest, pairs: Float, low_risk: float, high_risk: float
) -> tuple[float, float]:
    """Return an interval of the loss whose ends are wrong with a probability of at most these risks, at any time.

    It holds the margins that the candidate has neither passed nor failed after any of these samples (the intersection
    of a confidence sequence), so that it agrees with the answer. An end that the samples do not determine, or whose
    risk is 0, is infinite, or the smallest or the largest possible loss.
    """
    if not len(pairs):
        return -math.inf, math.inf
    loss = test.loss(pairs)
    passing = _smallest(
        lambda distance: test.evidence(pairs, loss + distance).passes.max() >= _target(high_risk)
    )
    failing = _smallest(
        lambda distance: test.evidence(pairs, loss - distance).fails.max() >= _target(low_risk)
    )
    return max(loss - failing, test.lowest), min(loss + passing, test.highest)


def _target(level: float) -> float:
    """Return the logarithm of the e-value whose p-value is ``level``; infinite for 0."""
    return -math.log(level) if level else math.inf


def _smallest(is_enough: Callable[[float], bool]) -> float:
    """Return the smallest distance that is enough, by doubling and bisection; infinity if none of up to 100 is."""
    low = 0.0
    high = 1e-3
    while not is_enough(high):
        low, high = high, 2.0 * high
        if low > 100.0:
            return math.inf
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def more_samples(
    test: PairedTest, pairs: Float, margin: float, *, passes: float, fails: float
) -> int | None:
    """Estimate how many more samples would decide, by testing those so far again and again.

    None without samples, or if the loss is so near to the margin that a hundred times as many would not decide. A
    candidate passes or fails at p-values of at most ``passes`` and ``fails``.
    """
    for repeats in _REPEATS if len(pairs) else ():
        evidence = test.evidence(np.tile(pairs, (repeats, 1)), margin)
        decides = (evidence.passes >= _target(passes)) | (evidence.fails >= _target(fails))
        # Look only beyond the samples so far
        decides[: len(pairs)] = False
        if decides.any():
            return int(decides.argmax()) + 1 - len(pairs)
    return None


class Rounds(ABC):
    """Samples of a criterion, in rounds of ``size``, of which the last may be shorter.

    ``identity`` is a text of everything that the samples depend on besides the model; ``prepared`` are the arrays that
    the dense model prepares for each round.
    """

    size = 16
    identity: str
    num_samples: int
    prepared: tuple[arrays.Array, ...] = ()
    details: tuple[arrays.Array, ...] = ()  # what ``measure_all`` returns beside the scores
    scored = SCORE  # array of a round that ``scores`` takes
    # What ``measure_all`` returns besides of the dense model, and takes of it to measure another one
    reference: tuple[arrays.Array, ...] = ()

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds."""
        return -(-self.num_samples // self.size)

    def part(self, index: int) -> slice:
        """Return the samples of a round."""
        return slice(index * self.size, (index + 1) * self.size)

    def prepare(self, index: int, dense: "PreTrainedModel") -> dict[str, NDArray[Any]]:
        """Return the arrays ``prepared`` of a round; called only if there are any."""
        return {}

    @abstractmethod
    def measure(self, index: int, model: "PreTrainedModel", prepared: Prepared) -> Float:
        """Measure a round: finite numbers, at least one; ``NO_SCORE`` for samples to leave out."""

    def measure_all(
        self, index: int, model: "PreTrainedModel", prepared: Prepared
    ) -> dict[str, NDArray[Any]]:
        """Measure a round as ``measure`` does, with ``details`` of it, which no answer depends on.

        Without its arrays ``reference`` among those prepared, the model is the dense one, and they are returned.
        """
        return {SCORE.name: self.measure(index, model, prepared)}

    def check_dense(self, score: DenseScore) -> None:
        """Raise ``UserError`` if the dense model's scores are too low to judge a candidate by."""
        return

    def note(self, pairs: Float, details: Details) -> str:
        """Say what the scores [n, 2] of a candidate and the dense model do not; "" if there is nothing to say."""
        return ""

    def scores(self, measured: Sequence[Float]) -> Float:
        """Return one score per sample that the first rounds, measured in order, complete."""
        scores: Float = np.concatenate([np.empty(0), *measured])[: self.num_samples]
        return np.asarray(scores[scores != NO_SCORE])


@dataclass(frozen=True)
class Setting:
    """Models and text that every candidate of a verdict is measured with.

    ``text`` has its documents in random order, on none of which a candidate was selected; None if no criterion reads
    text. ``identity`` is that of the dense model, "" for a model in memory; ``seed`` draws samples.
    """

    dense: "PreTrainedModel"
    known_tokenizer: "PreTrainedTokenizerBase | None"
    text: "TokenBlocks | None"
    seed: int = 0
    identity: str = ""
    reporter: progress.Reporter = progress.SILENT

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer. Raises ``UserError`` if it was not given."""
        if self.known_tokenizer is None:
            raise UserError(
                "a criterion of the margin generates text, so it needs tokenizer, the model's tokenizer"
            )
        return self.known_tokenizer

    @property
    def blocks(self) -> "TokenBlocks":
        """Return the text, for a criterion that reads it."""
        assert self.text is not None
        return self.text

    @cached_property
    def text_hash(self) -> str:
        """Return the identity of the text: a hash of its tokens and their documents."""
        key = hashlib.sha256(str(self.blocks.tokens.shape).encode())
        for array in (self.blocks.tokens, self.blocks.document):
            key.update(np.ascontiguousarray(array).data)
        return key.hexdigest()


@dataclass(frozen=True)
class Criterion(registry.Entry, ABC):
    """Criterion by which candidates are compared with the dense model, by a paired ``test`` of samples.

    Subclasses are frozen dataclasses; values of their options are int, float, str, bool or a list of str, for which the
    option is repeated. The title is the heading of its card on the page; ``noun`` is what a sample is, in the plural;
    ``reads_text`` tells whether the samples are documents of the text (``--data``).
    """

    test: ClassVar[PairedTest]
    noun: ClassVar[str] = "documents"
    reads_text: ClassVar[bool] = True

    @abstractmethod
    def prepare(self, setting: Setting) -> Rounds:
        """Return the samples, in rounds. Raises ``UserError`` if there are none."""

    def check(self) -> None:  # most have nothing to check
        """Check the options before anything is loaded. Raises ``UserError``."""

    @classmethod
    def options_help(cls) -> str:
        """Return the name, the help and the default of each option; empty without options."""
        return " ".join(
            f"{name.replace('_', '-')}: {option.flag.help}"
            + (
                ""
                if option.default_text in ("None", "False")
                else f" Default: {option.default_text}."
            )
            for name, option in cls.options().items()
        )

    def with_words(self, words: Sequence[str]) -> "Criterion":
        """Return this criterion with options such as "lengths=512,4k", a word for each item of a list."""
        # Collect the words of each option
        texts: dict[str, list[str]] = {}
        options = {name.replace("_", "-"): option for name, option in self.options().items()}
        for word in words:
            name, _, text = word.partition("=")
            if name not in options:
                known = (
                    f"has no option '{name}'; it has {', '.join(options)}"
                    if options
                    else "takes no options"
                )
                raise UserError(f"--margin: criterion {self.name} {known}")
            texts.setdefault(name, []).append(text)
        # Parse the values
        values = {
            name: _value(name, options[name].type, options[name].flag, texts[name])
            for name in texts
        }
        return replace(self, **{name.replace("-", "_"): value for name, value in values.items()})


def _value(name: str, kind: Any, flag: Flag, texts: list[str]) -> Any:
    """Return the value of an option from its words, of which the last counts unless it takes a list."""
    from pydantic import TypeAdapter, ValidationError

    takes_list = any(get_origin(each) is list for each in (kind, *get_args(kind)))
    try:
        value = TypeAdapter(kind).validate_python(texts if takes_list else texts[-1])
    except ValidationError as error:
        raise UserError(f"--margin: {name}={texts[-1]}: {error.errors()[0]['msg']}") from error
    if flag.low is not None and value < flag.low:
        raise UserError(f"--margin: {name}={value}: it must be at least {flag.low:,}")
    if flag.high is not None and value > flag.high:
        raise UserError(f"--margin: {name}={value}: it must be at most {flag.high:,}")
    return value
