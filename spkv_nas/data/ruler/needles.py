"""Needle-in-a-haystack: the eight RULER tasks that ask for values which the text assigns to keys.

As in RULER: the kinds of keys and values, how many of each are hidden and asked for, values drawn independently, a line
for each needle in noise or among needles, and 128 new tokens. Different from RULER: the wording, distinct keys (so that
a question has one answer), needles at independent uniform depths (RULER draws distinct positions, 40 of them in
essays), and essays that begin at a random sentence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from spkv_nas.data.ruler import haystacks, sample, words
from spkv_nas.data.ruler.material import Material

_DRAW: dict[str, Callable[[Random], str]] = {"word": words.word_pair, "number": words.number, "uuid": words.uuid}
NEW_TOKENS = 128


@dataclass(frozen=True)
class Needles:
    """One of the needle tasks."""

    haystack: str = "essays"  # or "noise", or "needles": sentences like the hidden one, with other keys
    key: str = "word"  # kind of keys: "word", "number" or "uuid"
    value: str = "number"  # kind of values
    num_keys: int = 1  # number of hidden keys
    num_values: int = 1  # number of values per key
    num_queries: int = 1  # number of keys asked for

    def generate(self, request: sample.Request, material: Material) -> sample.Sample:
        """Generate a sample; noise replaces essays if there are none."""
        rng = request.rng
        seen: set[str] = set()
        draw_key, draw_value = partial(_DRAW[self.key], rng), partial(_DRAW[self.value], rng)
        # Draw keys, values, depths and queries
        keys = [words.new(draw_key, seen) for _ in range(self.num_keys)]
        values = [[draw_value() for _ in range(self.num_values)] for _ in keys]
        needles = [self._needle(key, value) for key, drawn in zip(keys, values, strict=True) for value in drawn]
        depths = [rng.random() for _ in needles]
        queried = rng.sample(range(self.num_keys), self.num_queries)
        haystack, separator = self._haystack(rng, seen, material)
        # Word the question
        answers = [value for number in queried for value in values[number]]
        is_plural = len(answers) > 1
        values_of_keys = f"magic {self.value}{'s' if is_plural else ''} of {_listed([keys[i] for i in queried])}"
        head = f"Remember the magic {self.value}s that this text names. You will be asked for them.\n"
        question = f"\nWhat {'are' if is_plural else 'is'} the {values_of_keys}?"

        def render(number: int) -> str:
            return f"{head}{haystacks.hide(haystack(number), needles, depths, separator)}{question}"

        prefix = f"In the text the {values_of_keys} {'are' if is_plural else 'is'}"
        return sample.fill(request, render, prefix, answers, new_tokens=NEW_TOKENS)

    def _needle(self, key: str, value: str) -> str:
        return f"A magic {self.value} of {key} is {value}."

    def _haystack(self, rng: Random, seen: set[str], material: Material) -> tuple[haystacks.Haystack, str]:
        """Return (parts by number of units, separator); other needles stay the same however many are made."""
        if self.haystack == "essays" and material.essays is not None:
            return material.essays.start(rng), haystacks.SPACE
        if self.haystack != "needles":
            return haystacks.noise, haystacks.LINE_BREAK
        # Draw further needles on demand, so that a longer text extends a shorter one
        others: list[str] = []

        def more(number: int) -> list[str]:
            for _ in range(number - len(others)):
                key = words.new(partial(_DRAW[self.key], rng), seen)
                others.append(self._needle(key, _DRAW[self.value](rng)))
            return others[:number]

        return more, haystacks.LINE_BREAK


def _listed(names: list[str]) -> str:
    """Join names, for example "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
