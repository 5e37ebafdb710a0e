"""Texts to hide needles in: RULER's noise, essays of the user, or any list of sentences.

A haystack is a function from a number of units to parts: lines of noise or of other needles, joined by line breaks, or
sentences of essays, joined by spaces, as in RULER (``hide``). A needle at depth ``d`` in [0, 1) is inserted before part
``floor(d * (parts + 1))``, so that its depth does not depend on the length.
"""

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
_MAX_DOCUMENTS, _MAX_WORDS = 1000, 500_000
_LONGEST = 60  # maximum words per sentence; text without full stops is cut
_MIN_SENTENCES = 20  # minimum number of sentences of essays


def noise(number: int) -> list[str]:
    """Repeat RULER's noise, five sentences a line, up to ``number`` sentences; the last line may break off."""
    sentences = _NOISE * (number // len(_NOISE) + 1)
    return [" ".join(sentences[start : min(start + len(_NOISE), number)]) for start in range(0, number, len(_NOISE))]


@dataclass(frozen=True)
class Essays:
    """Sentences of the user's own text, each as its words; reading continues at the first after the last."""

    sentences: tuple[tuple[str, ...], ...]

    @classmethod
    def read(cls, files: Sequence[str], asked_by: str = "--haystack") -> "Essays":
        """Read half a million words from files and folders, which the option ``asked_by`` names."""
        all_sentences: list[tuple[str, ...]] = []
        num_words = 0
        for document in islice(documents([*files], Path()), _MAX_DOCUMENTS):
            sentences = list(_sentences(document.text))
            all_sentences += sentences
            num_words += sum(map(len, sentences))
            if num_words >= _MAX_WORDS:
                break
        if len(all_sentences) < _MIN_SENTENCES:
            raise UserError(
                f"{asked_by} {', '.join(files)}: {len(all_sentences)} sentences; at least {_MIN_SENTENCES} are needed "
                "to hide needles"
            )
        return cls(tuple(all_sentences))

    def start(self, rng: Random) -> Haystack:
        """Return the haystack that begins at a random sentence; a unit is a word, and the last sentence may be cut."""
        first = rng.randrange(len(self.sentences))

        def haystack(number: int) -> list[str]:
            parts: list[str] = []
            while number > 0:
                words = self.sentences[(first + len(parts)) % len(self.sentences)]
                parts.append(" ".join(words[:number]))
                number -= len(words)
            return parts

        return haystack


def _sentences(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the sentences of a text, cut after full stops, question and exclamation marks."""
    for sentence in re.split(r"(?<=[.!?])\s+", text.strip()):
        words = sentence.split()
        for start in range(0, len(words), _LONGEST):
            yield tuple(words[start : start + _LONGEST])


def hide(parts: Sequence[str], needles: Sequence[str], depths: Sequence[float], separator: str = LINE_BREAK) -> str:
    """Join the parts of a haystack, with each needle at its depth; needles at the same position keep their order."""
    positions = sorted((int(depth * (len(parts) + 1)), number) for number, depth in enumerate(depths))
    joined: list[str] = []
    done = 0
    for position, number in positions:
        joined += [*parts[done:position], needles[number]]
        done = position
    return separator.join([*joined, *parts[done:]])
