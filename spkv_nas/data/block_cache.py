"""Cache the token blocks of a text in a folder named by the content of its documents.

The content is only known once the text has been read. To avoid reading it at every start, the folder also stores the
state (size and times) of the files that it was read from; a text is read again only if its state is new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json, write_json
from spkv_nas.data.config import SourceConfig
from spkv_nas.data.readers import open_source
from spkv_nas.data.sources import Document
from spkv_nas.data.tokenizer import PLAIN, Boundaries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STATES = "sources.json"  # per folder: hashes of source states, newest first
_MAX_STATES = 16
_FORMAT = "4"  # version of how texts become blocks


class BlockCache:
    """Cache folders of one text under ``root``."""

    def __init__(
        self,
        root: Path,
        sources: Iterable[str | SourceConfig],
        base: Path,
        tokenizer: PreTrainedTokenizerBase,
        settings: str,
        boundaries: Boundaries = PLAIN,
    ) -> None:
        """Describe the text.

        Args:
            root: folder of the cache.
            sources: text sources.
            base: folder that relative paths start from.
            tokenizer: tokenizer of the blocks.
            settings: everything else that determines the blocks.
            boundaries: tokens that every block begins with, and those after each document.
        """
        self.root, self._sources, self._base = root, list(sources), base
        self.boundaries = boundaries
        self._decided = (_FORMAT, fingerprint(tokenizer), f"{settings} {boundaries}")

    def find(self, has_all: Callable[[Path], bool]) -> Path | None:
        """Return the folder of the text in its current state if ``has_all`` accepts it; None without one."""
        for file in sorted(self.root.glob(f"*/{_STATES}")):
            if self._state in _read_states(file) and has_all(file.parent):
                return file.parent
        return None

    @property
    def partial(self) -> Path:
        """Return the folder for blocks in progress, whatever the content; its files list the documents so far."""
        names = [source if isinstance(source, str) else source.model_dump_json() for source in self._sources]
        return self.root / f".{_hash([str(self._base), *names, *self._decided])}.partial"

    def folder(self, content: ContentKey) -> Path:
        """Return the folder of the text with this content."""
        return self.root / content.name(self._decided)

    def remember(self, folder: Path) -> None:
        """Record that ``folder`` holds the text in its current state."""
        states = [state for state in _read_states(folder / _STATES) if state != self._state]
        write_json(folder / _STATES, {"states": [self._state, *states][:_MAX_STATES]})

    @cached_property
    def _state(self) -> str:
        """Return a hash of the current state of the sources."""
        states = [open_source(source, self._base).identity for source in self._sources]
        return _hash([*states, *self._decided])


class ContentKey:
    """Hash of a text's documents and their names, which the blocks keep."""

    def __init__(self) -> None:
        """Start without documents."""
        self._key = hashlib.sha256()

    def add(self, document: Document) -> None:
        """Add the next document."""
        self._key.update("\0".join([document.id, document.domain, document.label, ""]).encode())

    def name(self, decided: Iterable[str]) -> str:
        """Return 16 hexadecimal digits for the documents so far and the values of ``decided``."""
        key = self._key.copy()
        for part in decided:
            key.update(part.encode())
        return key.hexdigest()[:16]


def _read_states(file: Path) -> list[str]:
    """Read the states of a folder; empty for a missing or damaged file, so that the text is read again."""
    try:
        states = read_json(file, "states of text sources").get("states")
    except UserError:
        return []
    return [str(state) for state in states] if isinstance(states, list) else []


def _hash(parts: Iterable[str]) -> str:
    """Return 16 hexadecimal digits for a sequence of strings."""
    key = hashlib.sha256()
    for part in parts:
        key.update(f"{part}\0".encode("utf-8", "surrogateescape"))
    return key.hexdigest()[:16]


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a string that identifies how a tokenizer encodes text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
