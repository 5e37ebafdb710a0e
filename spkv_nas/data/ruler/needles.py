"""Needles in a haystack: the eight tasks of RULER that ask for values which the text names for keys.

As in RULER: what keys and values are, how many of each are hidden and asked for, values drawn independently, a line for
each needle in noise or among needles, and 128 new tokens. Our own: the wording, keys that are drawn distinct (so that
a question has one answer), needles at independent uniform depths (RULER takes distinct places, in essays 40 of
them), and essays from a random sentence on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from spkv_nas.data.ruler import words
from spkv_nas.data.ruler.haystacks import LINE_BREAK, SPACE, Haystack, hide, noise
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample import Request, Sample, fill

_DRAW: dict[str, Callable[[Random], str]] = {"word": words.word_pair, "number": words.number, "uuid": words.uuid}
NEW_TOKENS = 128


@dataclass(frozen=True)
class Needles:
    """One of the tasks.

    Attributes:
        haystack: "noise", "essays", or "needles": sentences like the one that is asked for, with other keys.
        key, value: "word", "number" or "uuid".
        num_keys: hidden; ``num_queries`` of them are asked for.
        num_values: of each key.
    """

    haystack: str = "essays"
    key: str = "word"
    value: str = "number"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def generate(self, request: Request, material: Material) -> Sample:
        """A sample; noise takes the place of essays where there are none."""
        rng = request.rng
        seen: set[str] = set()
        draw_key, draw_value = partial(_DRAW[self.key], rng), partial(_DRAW[self.value], rng)
        keys = [words.new(draw_key, seen) for _ in range(self.num_keys)]
        values = [[draw_value() for _ in range(self.num_values)] for _ in keys]
        needles = [self._needle(name, one) for name, own in zip(keys, values, strict=True) for one in own]
        depths = [rng.random() for _ in needles]
        asked = rng.sample(range(self.num_keys), self.num_queries)
        haystack, separator = self._haystack(rng, seen, material)
        answers = [value for number in asked for value in values[number]]
        many = len(answers) > 1
        what = f"magic {self.value}{'s' if many else ''} of {_listed([keys[number] for number in asked])}"
        head = f"Remember the magic {self.value}s that this text names. You will be asked for them.\n"
        question = f"\nWhat {'are' if many else 'is'} the {what}?"

        def render(number: int) -> str:
            return f"{head}{hide(haystack(number), needles, depths, separator)}{question}"

        prefix = f"In the text the {what} {'are' if many else 'is'}"
        return fill(request, render, prefix, answers, new_tokens=NEW_TOKENS)

    def _needle(self, key: str, value: str) -> str:
        return f"A magic {self.value} of {key} is {value}."

    def _haystack(self, rng: Random, seen: set[str], material: Material) -> tuple[Haystack, str]:
        """Choose (parts by number of units, what joins them); other needles are the same however many are made."""
        if self.haystack == "essays" and material.essays is not None:
            return material.essays.start(rng), SPACE
        if self.haystack != "needles":
            return noise, LINE_BREAK
        others: list[str] = []

        def more(number: int) -> list[str]:
            for _ in range(number - len(others)):
                key = words.new(partial(_DRAW[self.key], rng), seen)
                others.append(self._needle(key, _DRAW[self.value](rng)))
            return others[:number]

        return more, LINE_BREAK


def _listed(names: list[str]) -> str:
    """Such as "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
