"""Aggregation: which words a text has most often, in a numbered list (``cwe``) or among coded words (``fwe``).

As in RULER: ten common words 30 times and the others 3 times (below 4,096 tokens 6 times and once), 120 new tokens, a
worked example of a smaller list; coded words of six letters by a zeta distribution of exponent 2, whose most frequent
is dots, a fiftieth of the length as many words, and 50 new tokens. Our own: the wording, answers between commas, at
least ten other words, smaller forms of the list where there is no room for RULER's, and where a list needs more words
than there are (8,166) pairs such as "quiet-harbour" beside them, where RULER draws all from a larger list of words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from spkv_nas.data.ruler import words
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample import Request, Sample, fill, first_fitting

_LONG = 4096  # tokens, from which words are repeated most often
_TOKENS = 3  # of an entry of the list at least: number, full stop, word
_DOTS = "..."


class _Form(NamedTuple):
    """How often common words and others are there; and of a worked example the number of words, and how often."""

    often: int
    seldom: int
    example: tuple[int, int, int] | None


_FORMS = (_Form(30, 3, (40, 10, 3)), _Form(6, 1, (20, 3, 1)), _Form(6, 1, None), _Form(3, 1, None))


@dataclass(frozen=True)
class CommonWords:
    """``num_common`` words are there more often than all others."""

    num_common: int = 10
    new_tokens: int = 120

    def generate(self, request: Request, _material: Material) -> Sample:
        """A sample in the first form that has room."""
        forms = _FORMS if request.length >= _LONG else _FORMS[1:]
        return first_fitting(partial(self._make, request, form) for form in forms)

    def _make(self, request: Request, form: _Form) -> Sample:
        rng = request.rng
        prefix = f"Answer: The {self.num_common} most frequent words of the list are"
        example = ""
        if form.example is not None:
            num_words, often, seldom = form.example
            common, others = self._drawn(rng, num_words)
            example = f"{self._prompt(rng, common * often + others * seldom)}\n{prefix} {', '.join(common)}\n\n"
        most = request.length // (_TOKENS * form.seldom)
        common, others = self._drawn(rng, most + self.num_common)
        order = rng.getrandbits(64)

        def render(number: int) -> str:
            return example + self._prompt(Random(order), common * form.often + others[:number] * form.seldom)

        least = self.num_common
        return fill(request, render, prefix, common, new_tokens=self.new_tokens, least=least, most=max(least, most))

    def _drawn(self, rng: Random, number: int) -> tuple[list[str], list[str]]:
        """Draw ``number`` distinct words, and pairs where there are too few: (the common ones, the others)."""
        drawn = rng.sample(words.all_words(), min(number, len(words.all_words())))
        seen = set(drawn)
        drawn += [words.new(lambda: words.word_pair(rng), seen) for _ in range(number - len(drawn))]
        return drawn[: self.num_common], drawn[self.num_common :]

    def _prompt(self, rng: Random, entries: list[str]) -> str:
        rng.shuffle(entries)
        listed = " ".join(f"{place}. {word}" for place, word in enumerate(entries, 1))
        head = "Some words of this numbered list are in it more often than others. Remember them."
        return f"{head}\n{listed}\nQuestion: Which {self.num_common} words are in the list most often?"


@dataclass(frozen=True)
class FrequentWords:
    """Word ``k`` by frequency is there ``n k^-exponent / zeta(exponent)`` times, of ``n`` words."""

    exponent: float = 2.0
    num_letters: int = 6
    num_answers: int = 3
    tokens_per_word: int = 50
    new_tokens: int = 50

    def generate(self, request: Request, _material: Material) -> Sample:
        """A sample."""
        rng = request.rng
        seen: set[str] = set()
        number = max(request.length // self.tokens_per_word, self.num_answers + 2)
        coded = [_DOTS, *(words.new(lambda: words.letters(rng, self.num_letters), seen) for _ in range(number - 1))]
        shares = [rank**-self.exponent / _zeta(self.exponent) for rank in range(1, number + 1)]
        order = rng.getrandbits(64)
        last = self.num_answers  # rank, from 0, of the last answer: it must be there more often than the next

        def render(size: int) -> str:
            entries = [word for word, share in zip(coded, shares, strict=True) for _ in range(int(size * share))]
            Random(order).shuffle(entries)
            head = "Count how often each coded word is in this text; the dots are none."
            return f"{head}\n{' '.join(entries)}\nQuestion: Which {last} coded words are there most often?"

        least = math.ceil(1 / (shares[last] - shares[last + 1]))
        prefix = f"Answer: The {last} most frequent coded words are"
        return fill(request, render, prefix, coded[1 : last + 1], new_tokens=self.new_tokens, least=least)


def _zeta(exponent: float) -> float:
    from scipy.special import zeta

    return float(zeta(exponent))
