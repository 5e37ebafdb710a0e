"""Create mutants of files, and attack a reader of such files with them.

Each mutant must be accepted, or refused with a ``UserError`` of at most 1,000 characters; a numerical warning counts as
a crash.
"""

from __future__ import annotations

import io
import json
import random
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import parse_yaml

MAX_CHARACTERS = 1000  # of an error's message


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of file.

    Attributes:
        name: of the kind of file.
        make: writes a sound file, and what belongs beside it, to a new folder; the file to attack.
        read: reads that file as commands do, and does with it what they do first.
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], object]


@dataclass
class Outcome:
    """Responses of a reader to its mutants."""

    accepted: int = 0
    refused: int = 0
    crashes: list[str] = field(default_factory=list)
    slowest: float = 0.0


def attack(reader: Reader, number: int, seed: int = 0) -> Outcome:
    """Read ``number`` mutants of the sound file; every crash is reported with the mutant's beginning."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        file = reader.make(Path(folder))
        reader.read(file)
        sound = file.read_bytes()
        for mutant in mutants(sound, number, seed):
            file.write_bytes(mutant)
            start = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    warnings.simplefilter("ignore", UserWarning)
                    reader.read(file)
                outcome.accepted += 1
            except UserError as error:
                outcome.refused += 1
                if len(str(error)) > MAX_CHARACTERS:
                    outcome.crashes.append(f"a message of {len(str(error))} characters")
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-3:]
                places = " < ".join(
                    f"{Path(one.filename).name}:{one.lineno}" for one in reversed(where)
                )
                outcome.crashes.append(f"{error!r:.200} at {places}: {mutant[:200]!r}")
            outcome.slowest = max(outcome.slowest, time.perf_counter() - start)
    return outcome


HOSTILE = (
    b"", b"-1", b"1e300", b"-1e300", b"1e-300", b"1e400", b"9223372036854775808", b"18446744073709551616", b"nan",
    b".nan", b"inf", b"-.inf", b"1" * 5000, b"x" * 300, b"../../evil", b"/abs", b"..", b"\x00", b"\xff\xfe",
    b"\xed\xa0\x80", b"\\ud800", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"[" * 2000, b"{" * 2000, b"[[]]", b"{}", b"[]",
    b"null", b"true", b"~", b"0", b"2024-13-45", b"2024-01-01", b"!!int x", b"!!binary zz", b"!!set {a, b}",
    b"!!python/object/apply:os.system [x]", b"&a [*a]", b"*a", b"? [1]: 2", b"<<: 1", b"1:30", b"0x1f", b"1_000",
    b"=cmd()", b'"', b"'", b",", b"\n", b"\r", b"\t", b"#", b"- ", b": ", b"G" * 5000, b"full-attention", b"sp-kv",
)  # fmt: skip


def mutants(sound: bytes, number: int, seed: int = 0) -> Iterator[bytes]:
    """Yield hostile values in place of ``sound``, each followed by a mutant of it.

    Mutants have flipped bits, cuts, removed or repeated lines, and values, types or arrays of another kind. After bytes
    that are no text, each file begins with other values of ``HOSTILE``: few mutants of many files take them all.
    """
    draw = random.Random(seed)
    kinds: list[Callable[[bytes, random.Random], bytes]] = [
        _flip,
        _cut,
        _lines,
        _value,
        _value,
        _value,
        _insert,
    ]
    with suppress(UserError, UnicodeDecodeError):
        parse_yaml(sound.decode(), "the sound file")
        kinds += [_retype, _retype]
    if sound[:2] == b"PK":
        kinds = [_flip, _cut, _array, _array, _array, _array]
    first = len(sound) % len(HOSTILE)
    hostile = (b"\xff\xfe", *HOSTILE[first:], *HOSTILE[:first])
    for index in range(number):
        if index % 2 == 0:
            yield hostile[index // 2 % len(hostile)]
        else:
            yield draw.choice(kinds)(sound, draw)


def _retype(sound: bytes, draw: random.Random) -> bytes:
    """Replace one value of a YAML or JSON mapping by one of another type, or remove it; the result is JSON."""
    content = parse_yaml(sound.decode(), "the sound file")
    places: list[tuple[Any, Any]] = [(content, key) for key in content]
    for holder, key in places:  # grows by the places inside
        value = holder[key]
        places += [(value, inner) for inner in value] if isinstance(value, dict) else []
        places += [(value, inner) for inner in range(len(value))] if isinstance(value, list) else []
    holder, key = draw.choice(places)
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(
            (None, 3, -1, 2.5, True, "x", [], ["a"], [None], [[1]], {}, {"a": 1})
        )
    return json.dumps(content).encode()


def _flip(sound: bytes, draw: random.Random) -> bytes:
    data = bytearray(sound)
    for _ in range(draw.choice((1, 1, 3, 20))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def _cut(sound: bytes, draw: random.Random) -> bytes:
    start, end = sorted(draw.randrange(len(sound) + 1) for _ in range(2))
    return draw.choice(
        (sound[:end], sound[start:], sound[:start] + sound[end:], sound + sound[start:end])
    )


def _lines(sound: bytes, draw: random.Random) -> bytes:
    lines = sound.splitlines(keepends=True)
    index = draw.randrange(len(lines))
    changed = draw.choice(
        (
            [],
            [lines[index]] * 2,
            [lines[index]] * 50,
            [draw.choice(lines)],
            [b"\n"],
            [b" ", lines[index]],
        )
    )
    return b"".join([*lines[:index], *changed, *lines[index + 1 :]])


def _value(sound: bytes, draw: random.Random) -> bytes:
    words = list(re.finditer(rb"[^\s,:{}\[\]]+", sound))
    for _ in range(draw.choice((1, 1, 1, 2))):
        word = draw.choice(words)
        changed = draw.choice((*HOSTILE, draw.choice(words)[0]))
        if sound[word.start() : word.end()] == word[0]:
            sound = sound[: word.start()] + changed + sound[word.end() :]
    return sound


def _insert(sound: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(sound) + 1)
    return sound[:at] + draw.choice(HOSTILE) + sound[at:]


def _array(sound: bytes, draw: random.Random) -> bytes:
    """Replace one array of a sound archive by one of another kind or shape, or with a value out of range."""
    with np.load(io.BytesIO(sound)) as result:
        arrays: dict[str, Any] = {name: result[name] for name in result.files}
    name = draw.choice(sorted(arrays))
    values = arrays[name]
    numeric = values.dtype.kind in "iuf"
    spoilt = values.astype(np.float64) if numeric else values
    if numeric and spoilt.size:
        spoilt = spoilt.copy()
        spoilt.flat[draw.randrange(spoilt.size)] = draw.choice(
            (np.nan, np.inf, -1.0, 1e300, 2.0**62, 0.5)
        )
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = [
            values.ravel(),
            values.ravel()[:0],
            values[..., None],
            values.T,
            np.array(values.flat[0]),
            values.astype(str),
            values.astype("S"),
            np.array("[]"),
            np.array("[{}]"),
            np.array("null"),
            np.array("[" * 10**5),
            np.array('[{"id": 1, "domain": 2, "name": 3}]'),
            np.array(["a", "a"]),
        ]
        if values.ndim:
            others += [values[..., :-1], values[::-1], np.concatenate([values] * 2)]
        if numeric:
            others += [
                spoilt,
                spoilt.astype(values.dtype),
                -spoilt,
                np.zeros_like(spoilt),
                values.astype(np.complex64),
                values.astype(bool),
            ]
        arrays[name] = draw.choice(others)
        if draw.random() < 0.1:
            del arrays[name]
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
    return buffer.getvalue()
