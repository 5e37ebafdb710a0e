"""Find the text files of a folder, say what else it holds, and open compressed files.

A file is read by the ending of its name, ``.jsonl`` for ``a.jsonl`` as for ``a.jsonl.gz``. Compressed files are
unpacked while they are read, and never as a whole.
"""

import gzip
import io
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from spkv_nas.base import units
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import is_file

TEXT_ENDINGS = (".txt", ".md", ".py", ".rst")
TABLE_ENDINGS = (".jsonl", ".parquet", ".arrow")
_DATA_ENDINGS = (".txt", *TABLE_ENDINGS)  # of data rather than pages or programs
READABLE = (*TEXT_ENDINGS, *TABLE_ENDINGS)
PACKED = (".gz", ".zst")  # endings of compressed files
_STREAMED = (*TEXT_ENDINGS, ".jsonl")  # what can be read while it is unpacked
FORMATS = f"{' '.join(READABLE)}, and {' and '.join(PACKED)} of {' '.join(_STREAMED)}"
# Files that would be read as text that they are not, and what to do
_NO_TEXT = {
    ".json": "write one JSON object per line (.jsonl)",
    **dict.fromkeys(
        (".csv", ".tsv", ".xlsx", ".feather", ".orc", ".avro"), "convert it to .jsonl or .parquet"
    ),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".lz4"), "unpack it"),
    **dict.fromkeys((".pdf", ".docx", ".epub"), "convert it to text"),
    **dict.fromkeys(
        (".npy", ".npz", ".bin", ".pt", ".pkl", ".safetensors", ".h5", ".db", ".sqlite"),
        "give text",
    ),
}
_METADATA = ("dataset_info.json", "state.json", "dataset_dict.json")  # of saved data sets
_CACHE = "cache-*.arrow"  # what the datasets library computed from a saved data set
_MAX_KINDS = 5  # of files to name
_MAX_UNPACKED = 1 << 30  # bytes that any file may unpack to
_MAX_RATIO = 100  # multiple of its size that a larger file may unpack to


def ending(file: Path) -> str:
    """Return the ending that tells how a file is read, in lower case: ``.txt`` for ``a.txt.gz``, which is unpacked."""
    suffix = file.suffix.lower()
    if suffix not in PACKED:
        return suffix
    inner = file.with_suffix("").suffix.lower()
    return inner if inner in _STREAMED else f"{inner}{suffix}"


def check_file(file: Path) -> None:
    """Raise ``UserError`` for a file that holds something else than text, by the ending of its name."""
    kind = ending(file)
    if kind.endswith(PACKED):
        raise UserError(f"cannot read {file} while unpacking it: unpack it; {FORMATS} can be read")
    if kind in _NO_TEXT:
        raise UserError(f"cannot read {file}: {kind} files are not read as text: {_NO_TEXT[kind]}")


@dataclass
class Found:
    """Files below a folder: those to read, and those that are not."""

    folder: Path
    readable: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)  # of other formats
    # Links to nothing, and folders that cannot be opened
    broken: list[Path] = field(default_factory=list)
    card: Path | None = None  # README of a folder of data, which describes it

    @property
    def note(self) -> str | None:
        """Return a sentence on the files that are not read; None without any."""
        parts = []
        if self.card is not None:
            parts.append(f"{self.card.name}, which describes {_kinds(self.readable)}")
        if self.others:
            parts.append(f"{_kinds(self.others)} (read are {FORMATS})")
        if self.broken:
            name = os.path.relpath(self.broken[0], self.folder)
            parts.append(
                f"{len(self.broken)} links to nothing or "
                f"folders that cannot be opened, such as {name}"
            )
        return f"{self.folder}: not read: {'; '.join(parts)}" if parts else None


def find(folder: Path) -> Found:
    """Find the files below a folder, sorted, also below linked folders, each of which is read once.

    Hidden files of other formats are not mentioned, nor what describes a saved data set.
    """
    found = Found(folder)
    seen: set[tuple[int, int]] = set()

    def unreadable(error: OSError) -> None:
        found.broken.append(Path(error.filename))

    for parent, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        # Enter a folder once, whatever links lead to it
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        for name in names:
            _sort_in(found, Path(parent, name))
    for files in (found.readable, found.others, found.broken):
        files.sort()
    _set_card_apart(found)
    return found


def _set_card_apart(found: Found) -> None:
    """Leave out the README of a folder whose other files are all data, and no pages or programs like it."""
    cards = [file for file in found.readable if file.parent == found.folder and is_card(file)]
    others = [file for file in found.readable if file not in cards]
    if len(cards) != 1 or not others:
        return
    if all(ending(file) in _DATA_ENDINGS for file in others):
        found.card = cards[0]
        found.readable = others


def is_card(file: Path) -> bool:
    """Return whether a file is a README, by its name."""
    return file.name.lower().startswith("readme.")


def _sort_in(found: Found, file: Path) -> None:
    """Add a file to those to read, or to those that are not."""
    is_hidden = any(part.startswith(".") for part in file.relative_to(found.folder).parts)
    if not file.exists():
        found.broken.append(file)
    elif is_file(file) and ending(file) in READABLE and not file.match(_CACHE):
        found.readable.append(file)
    elif not is_hidden and file.name not in _METADATA:
        found.others.append(file)


def _kind(file: Path) -> str:
    """Return the ending by which a file is counted: ``.jsonl.gz`` of a file that is unpacked while it is read."""
    if file.match(_CACHE):
        return _CACHE
    kind = ending(file)
    suffix = file.suffix.lower()
    if suffix in PACKED and kind in _STREAMED:
        kind += suffix
    return kind or "without an ending"


def _kinds(files: Sequence[Path]) -> str:
    """Describe files by number and size of each ending, the largest first, such as "2 .csv (1.20 MiB)"."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for file in files:
        sizes[_kind(file)].append(file.stat().st_size)
    ordered = sorted(sizes, key=lambda kind: (-sum(sizes[kind]), kind))
    parts = [
        f"{len(sizes[kind]):,} {kind} ({units.format_bytes(sum(sizes[kind]))})"
        for kind in ordered[:_MAX_KINDS]
    ]
    rest = [size for kind in ordered[_MAX_KINDS:] for size in sizes[kind]]
    if rest:
        parts.append(f"{len(rest):,} others ({units.format_bytes(sum(rest))})")
    return ", ".join(parts)


@dataclass(frozen=True)
class Opened:
    """A file that is open, and unpacked while it is read."""

    stream: "io.BufferedReader[Any]"  # its content, unpacked
    file: BinaryIO  # the file itself

    @property
    def num_read(self) -> int:
        """Return the bytes of the file that have been read."""
        return self.file.tell()


@contextmanager
def opened(file: Path) -> Iterator[Opened]:
    """Open a file to read its content; reading raises ``OSError`` if it is damaged or unpacks to far too much."""
    suffix = file.suffix.lower()
    with file.open("rb") as packed:
        if suffix not in PACKED:
            yield Opened(packed, packed)
            return
        with io.BufferedReader(_Unpacked(packed, suffix)) as stream:
            yield Opened(stream, packed)


class _Unpacked(io.RawIOBase):
    """Content of a compressed file."""

    def __init__(self, packed: BinaryIO, suffix: str) -> None:
        self._size = os.fstat(packed.fileno()).st_size
        self._num_unpacked = 0
        if suffix == ".gz":
            self._stream: Any = gzip.GzipFile(fileobj=packed)
        else:
            import pyarrow

            file = pyarrow.PythonFile(packed, mode="r")
            self._stream = pyarrow.CompressedInputStream(file, "zstd")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Unpack into a buffer; return the number of bytes, 0 at the end."""
        try:
            content = self._stream.read(len(buffer))
        # Errors of zlib, gzip and pyarrow: EOFError, zlib.error, ArrowInvalid, ...
        except Exception as error:
            raise OSError(f"cannot unpack it: {first_line(error)}") from error
        self._num_unpacked += len(content)
        if self._num_unpacked > max(_MAX_UNPACKED, _MAX_RATIO * self._size):
            raise OSError(
                f"its {self._size:,} bytes unpack to more than {self._num_unpacked:,}: "
                "unpack it to read it"
            )
        cast(memoryview, buffer)[: len(content)] = content
        return len(content)
