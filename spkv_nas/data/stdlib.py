"""The Python standard library of the running interpreter as a text corpus: real, everywhere, without a download.

Domains: ``tests`` (any ``test`` or ``tests`` folder), ``docs`` (the topics of ``pydoc_data``, one document each),
``tables`` (character maps and other generated data), ``code`` (the rest).
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

MAX_CHARACTERS = 100_000  # of one file; longer ones are cut, so that no table outweighs the code
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "ensurepip", "pydoc_data"}
_TABLE_FOLDERS = {"encodings", "pgen2", "unicode"}
_TABLE_NAMES = {"entities.py", "keysyms.py", "stringprep.py", "token.py", "_aix_support.py"}
_TEXT_SUFFIXES = {".py", ".txt", ".rst"}


def texts() -> Iterator[tuple[str, str, str]]:
    """(text, domain, name) of every readable file, sorted by path, then of every documentation topic."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*")):
        path = file.relative_to(root)
        if file.suffix not in _TEXT_SUFFIXES or not file.is_file() or _LEFT_OUT.intersection(path.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        yield text[:MAX_CHARACTERS], domain(path), str(path)
    for topic, text in sorted(topics.items()):
        yield text, "docs", f"pydoc_data/{topic}"


def domain(path: Path) -> str:
    """Domain of a file of the standard library, from its path."""
    folders = set(path.parts[:-1])
    if folders & {"test", "tests", "idle_test"}:
        return "tests"
    generated = path.name.startswith("_sysconfigdata") or path.name in _TABLE_NAMES
    return "tables" if generated or folders & _TABLE_FOLDERS else "code"
