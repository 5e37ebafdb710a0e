"""Read the standard library of the running Python as a text corpus: real text, on every machine, without a download.

Domains: ``tests`` (any ``test`` or ``tests`` folder), ``docs`` (the topics of ``pydoc_data``, one document each),
``tables`` (character maps and other generated data), ``code`` (everything else).
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

MAX_CHARACTERS = 100_000  # per file; longer ones are cut, so that no table outweighs the code
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "ensurepip", "pydoc_data"}
_TABLE_FOLDERS = {"encodings", "pgen2", "unicode"}
_TABLE_NAMES = {"entities.py", "keysyms.py", "stringprep.py", "token.py", "_aix_support.py"}
_TEXT_SUFFIXES = {".py", ".txt", ".rst"}


def files() -> Iterator[Path]:
    """Yield the text files, sorted by path."""
    root = _root()
    for file in sorted(root.rglob("*")):
        is_left_out = _LEFT_OUT.intersection(file.relative_to(root).parts)
        if file.suffix in _TEXT_SUFFIXES and file.is_file() and not is_left_out:
            yield file


def texts() -> Iterator[tuple[str, str, str]]:
    """Yield (text, domain, name) of every readable file, sorted by path, then of every documentation topic."""
    for file in files():
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        path = file.relative_to(_root())
        yield text[:MAX_CHARACTERS], domain(path), str(path)
    for topic, text in sorted(topics.items()):
        yield text, "docs", f"pydoc_data/{topic}"


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def domain(path: Path) -> str:
    """Return the domain of a file of the standard library, from its path."""
    folders = set(path.parts[:-1])
    if folders & {"test", "tests", "idle_test"}:
        return "tests"
    generated = path.name.startswith("_sysconfigdata") or path.name in _TABLE_NAMES
    return "tables" if generated or folders & _TABLE_FOLDERS else "code"
