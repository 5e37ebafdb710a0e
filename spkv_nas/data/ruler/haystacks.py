"""Texts in which needles are hidden: RULER's noise, essays of one's own, or any list of sentences.

A haystack is a function from a number of units to parts: lines of noise or of other needles, joined by line breaks, or
sentences of essays, joined by spaces, as in RULER (``hide``). A needle at depth ``d`` in [0, 1) stands before part
``floor(d * (parts + 1))``, so that the depth of a needle does not depend on the length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from spkv_nas.base.errors import UserError
from spkv_nas.data.sources import documents

Haystack = Callable[[int], list[str]]
LINE_BREAK, SPACE = "\n", " "  # between lines of noise or needles; between sentences of essays

_NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
_MOST_DOCUMENTS, _MOST_WORDS = 1000, 500_000
_LONGEST = 60  # words of a sentence; text without full stops is cut
_LEAST = 20  # sentences of essays


def noise(number: int) -> list[str]:
    """Repeat RULER's noise, five sentences a line, up to ``number`` sentences; the last line may break off."""
    sentences = _NOISE * (number // len(_NOISE) + 1)
    return [" ".join(sentences[start : min(start + len(_NOISE), number)]) for start in range(0, number, len(_NOISE))]


@dataclass(frozen=True)
class Essays:
    """Sentences of the user's own text, each as its words, from the last of which one reads on at the first."""

    sentences: tuple[tuple[str, ...], ...]

    @classmethod
    def read(cls, files: Sequence[str], asked_by: str = "--haystack") -> Essays:
        """Half a million words of files and folders. Raises ``UserError`` where there are too few sentences.

        ``asked_by`` is the option that names the files, for the error.
        """
        found: list[tuple[str, ...]] = []
        num_words = 0
        for document in islice(documents([*files], Path()), _MOST_DOCUMENTS):
            sentences = list(_sentences(document.text))
            found += sentences
            num_words += sum(map(len, sentences))
            if num_words >= _MOST_WORDS:
                break
        if len(found) < _LEAST:
            raise UserError(f"{asked_by} {', '.join(files)}: {len(found)} sentences; needles want {_LEAST} at least")
        return cls(tuple(found))

    def start(self, rng: Random) -> Haystack:
        """The haystack from a random sentence on; a unit is a word, and the last sentence may break off."""
        first = rng.randrange(len(self.sentences))

        def haystack(number: int) -> list[str]:
            taken: list[str] = []
            while number > 0:
                words = self.sentences[(first + len(taken)) % len(self.sentences)]
                taken.append(" ".join(words[:number]))
                number -= len(words)
            return taken

        return haystack


def _sentences(text: str) -> Iterator[tuple[str, ...]]:
    """A text cut after full stops, question and exclamation marks."""
    for sentence in re.split(r"(?<=[.!?])\s+", text.strip()):
        words = sentence.split()
        for start in range(0, len(words), _LONGEST):
            yield tuple(words[start : start + _LONGEST])


def hide(parts: Sequence[str], needles: Sequence[str], depths: Sequence[float], separator: str = LINE_BREAK) -> str:
    """Join a haystack's parts, with each needle at its depth; of two in one place the first stands first."""
    places = sorted((int(depth * (len(parts) + 1)), number) for number, depth in enumerate(depths))
    joined: list[str] = []
    done = 0
    for place, number in places:
        joined += [*parts[done:place], needles[number]]
        done = place
    return separator.join([*joined, *parts[done:]])
