"""Vocabulary of RULER: English words, numbers of seven digits, UUIDs, and words of random letters."""

import string
from collections.abc import Callable
from functools import cache
from random import Random
from uuid import UUID

_TRIES = 100  # draws until a new word is found, among at least thousands


@cache
def category(name: str) -> tuple[str, ...]:
    """Return the words of a category, sorted: 6,782 of "noun", 910 of "adjective", others of "verb"."""
    from wonderwords import RandomWord

    return tuple(sorted(set(RandomWord().filter(include_categories=[name]))))


@cache
def all_words() -> tuple[str, ...]:
    """Return all nouns, adjectives and verbs, sorted, without duplicates."""
    return tuple(sorted({*category("noun"), *category("adjective"), *category("verb")}))


def word_pair(rng: Random) -> str:
    """Draw a word pair such as "quiet-harbour", one of six million."""
    return f"{rng.choice(category('adjective'))}-{rng.choice(category('noun'))}"


def number(rng: Random) -> str:
    """Draw a number of seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def uuid(rng: Random) -> str:
    """Draw a random UUID, 36 characters."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def letters(rng: Random, length: int, alphabet: str = string.ascii_lowercase) -> str:
    """Draw a word of random letters."""
    return "".join(rng.choices(alphabet, k=length))


def new(draw: Callable[[], str], seen: set[str]) -> str:
    """Draw until the result is not in ``seen``, and add it there."""
    for _ in range(_TRIES):
        word = draw()
        if word not in seen:
            seen.add(word)
            return word
    raise AssertionError("the draws of a task are from sets far larger than what it takes")
