"""What RULER hides and counts: English words, numbers of seven digits, UUIDs, and words of random letters."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import cache
from random import Random
from uuid import UUID

_TRIES = 100  # to find a word that is not there yet, of at least thousands


@cache
def nouns() -> tuple[str, ...]:
    """6,782, sorted."""
    return _category("noun")


@cache
def adjectives() -> tuple[str, ...]:
    """910, sorted."""
    return _category("adjective")


@cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, each once, sorted."""
    return tuple(sorted({*nouns(), *adjectives(), *_category("verb")}))


def _category(name: str) -> tuple[str, ...]:
    from wonderwords import RandomWord

    return tuple(sorted(set(RandomWord().filter(include_categories=[name]))))


def word_pair(rng: Random) -> str:
    """Such as "quiet-harbour": one of six million."""
    return f"{rng.choice(adjectives())}-{rng.choice(nouns())}"


def number(rng: Random) -> str:
    """Seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def uuid(rng: Random) -> str:
    """A random UUID, 36 characters."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def letters(rng: Random, length: int, alphabet: str = string.ascii_lowercase) -> str:
    """Random letters."""
    return "".join(rng.choices(alphabet, k=length))


def new(draw: Callable[[], str], seen: set[str]) -> str:
    """What ``draw`` gives and is not yet in ``seen``, which then has it."""
    for _ in range(_TRIES):
        found = draw()
        if found not in seen:
            seen.add(found)
            return found
    raise AssertionError("the draws of a task are from sets far larger than what it takes")
