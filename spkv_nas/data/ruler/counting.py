"""Aggregation: find the most frequent words of a numbered list (``cwe``) or of coded words (``fwe``).

As in RULER: ten common words occur 30 times and the others 3 times (below 4,096 tokens 6 times and once), 120 new
tokens, a worked example with a smaller list; coded words of six letters with a zeta distribution of exponent 2, whose
most frequent word is dots, one word per fifty tokens of the length, and 50 new tokens. Different from RULER: the
wording, answers separated by commas, at least ten other words, smaller forms of the list where RULER's do not fit, and
where a list needs more words than exist (8,166) additional pairs such as "quiet-harbour", where RULER draws all words
from a larger list.
"""

import math
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from spkv_nas.data.ruler import material, sample, words

_LONG = 4096  # tokens from which the form with most repetitions is tried
_TOKENS = 3  # minimum tokens per entry of the list: number, full stop, word
_DOTS = "..."


class _Form(NamedTuple):
    """Word list of ``cwe``: occurrences of common and other words; ``example``: (words, often, seldom) or None."""

    often: int
    seldom: int
    example: tuple[int, int, int] | None


_FORMS = (_Form(30, 3, (40, 10, 3)), _Form(6, 1, (20, 3, 1)), _Form(6, 1, None), _Form(3, 1, None))


@dataclass(frozen=True)
class CommonWords:
    """Task in which ``num_common`` words occur more often than all others."""

    num_common: int = 10
    new_tokens: int = 120

    def generate(self, request: sample.Request, _material: material.Material) -> sample.Sample:
        """Generate a sample in the first form that fits."""
        forms = _FORMS if request.length >= _LONG else _FORMS[1:]
        return sample.first_fitting(partial(self._make, request, form) for form in forms)

    def _make(self, request: sample.Request, form: _Form) -> sample.Sample:
        rng = request.rng
        prefix = f"Answer: The {self.num_common} most frequent words of the list are"
        # Write the worked example
        example = ""
        if form.example is not None:
            num_words, often, seldom = form.example
            common, others = self._drawn(rng, num_words)
            example = f"{self._prompt(rng, common * often + others * seldom)}\n{prefix} {', '.join(common)}\n\n"
        # Draw more words than can fit, and add as many as fit
        max_words = request.length // (_TOKENS * form.seldom)
        common, others = self._drawn(rng, max_words + self.num_common)
        order = rng.getrandbits(64)

        def render(number: int) -> str:
            return example + self._prompt(Random(order), common * form.often + others[:number] * form.seldom)

        least = self.num_common
        return sample.fill(
            request, render, prefix, common, new_tokens=self.new_tokens, least=least, most=max(least, max_words)
        )

    def _drawn(self, rng: Random, number: int) -> tuple[list[str], list[str]]:
        """Draw ``number`` distinct words, with pairs if there are too few; return (common ones, others)."""
        drawn = rng.sample(words.all_words(), min(number, len(words.all_words())))
        seen = set(drawn)
        drawn += [words.new(lambda: words.word_pair(rng), seen) for _ in range(number - len(drawn))]
        return drawn[: self.num_common], drawn[self.num_common :]

    def _prompt(self, rng: Random, entries: list[str]) -> str:
        """Return the numbered list, shuffled, with its question."""
        rng.shuffle(entries)
        listed = " ".join(f"{position}. {word}" for position, word in enumerate(entries, 1))
        head = "Some words of this numbered list are in it more often than others. Remember them."
        return f"{head}\n{listed}\nQuestion: Which {self.num_common} words are in the list most often?"


@dataclass(frozen=True)
class FrequentWords:
    """Task in which, of ``n`` words, the one of rank ``k`` occurs ``n k^-exponent / zeta(exponent)`` times."""

    exponent: float = 2.0
    num_letters: int = 6
    num_answers: int = 3
    tokens_per_word: int = 50
    new_tokens: int = 50

    def generate(self, request: sample.Request, _material: material.Material) -> sample.Sample:
        """Generate a sample."""
        from scipy.special import zeta  # too slow to import for --help

        rng = request.rng
        # Draw the coded words
        seen: set[str] = set()
        num_words = max(request.length // self.tokens_per_word, self.num_answers + 2)
        coded = [_DOTS, *(words.new(lambda: words.letters(rng, self.num_letters), seen) for _ in range(num_words - 1))]
        # Let their frequencies follow a power law (Zipf)
        shares = [rank**-self.exponent / float(zeta(self.exponent)) for rank in range(1, num_words + 1)]
        order = rng.getrandbits(64)
        last = self.num_answers  # rank, from 0, of the last answer, which must occur more often than the next word

        def render(size: int) -> str:
            entries = [word for word, share in zip(coded, shares, strict=True) for _ in range(int(size * share))]
            Random(order).shuffle(entries)
            head = "Count how often each coded word is in this text; the dots are none."
            return f"{head}\n{' '.join(entries)}\nQuestion: Which {last} coded words are there most often?"

        # Make the text long enough that the last answer is more frequent than the next word
        least = math.ceil(1 / (shares[last] - shares[last + 1]))
        prefix = f"Answer: The {last} most frequent coded words are"
        return sample.fill(request, render, prefix, coded[1 : last + 1], new_tokens=self.new_tokens, least=least)
