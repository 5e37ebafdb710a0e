"""Where the token blocks of a text are kept: in a folder named by the content of its documents.

The content is known once the text has been read. So that it is not read at every start, the folder also notes the state
of the files that it was read from; only a text whose state is new is read again.
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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STATES = "sources.json"  # of a folder: states of the sources, as hashes, the newest first
_MOST_STATES = 16
_FORMAT = "2"  # of how texts become blocks


class BlockCache:
    """The folders of one text under ``root``; ``settings`` are what decides its blocks beside text and tokenizer."""

    def __init__(
        self,
        root: Path,
        sources: Iterable[str | SourceConfig],
        base: Path,
        tokenizer: PreTrainedTokenizerBase,
        settings: str,
    ) -> None:
        self.root, self._sources, self._base = root, list(sources), base
        self._decided = (_FORMAT, fingerprint(tokenizer), settings)

    def find(self, has_all: Callable[[Path], bool]) -> Path | None:
        """The folder of the text as its sources are now, if ``has_all`` says that it holds what is wanted."""
        for file in sorted(self.root.glob(f"*/{_STATES}")):
            if self._state in _read_states(file) and has_all(file.parent):
                return file.parent
        return None

    @property
    def partial(self) -> Path:
        """The folder of blocks that are being written, the same whatever the text: what is there says its documents."""
        names = [source if isinstance(source, str) else source.model_dump_json() for source in self._sources]
        return self.root / f".{_hash([str(self._base), *names, *self._decided])}.partial"

    def folder(self, content: ContentKey) -> Path:
        """The folder of the text whose documents ``content`` has seen."""
        return self.root / content.name(self._decided)

    def remember(self, folder: Path) -> None:
        """Note that ``folder`` is that of the text as its sources are now."""
        states = [state for state in _read_states(folder / _STATES) if state != self._state]
        write_json(folder / _STATES, {"states": [self._state, *states][:_MOST_STATES]})

    @cached_property
    def _state(self) -> str:
        states = [open_source(source, self._base).identity for source in self._sources]
        return _hash([*states, *self._decided])


class ContentKey:
    """Changes with any document of a text, and with its name, which the blocks keep."""

    def __init__(self) -> None:
        self._key = hashlib.sha256()

    def add(self, document: Document) -> None:
        """The next document."""
        self._key.update("\0".join([document.id, document.domain, document.label, ""]).encode())

    def name(self, decided: Iterable[str]) -> str:
        """16 hexadecimal digits, for the documents so far and what else decides."""
        key = self._key.copy()
        for part in decided:
            key.update(part.encode())
        return key.hexdigest()[:16]


def _read_states(file: Path) -> list[str]:
    """None of a file that is not there or damaged: the text is then read again."""
    try:
        states = read_json(file, "states of text sources").get("states")
    except UserError:
        return []
    return [str(state) for state in states] if isinstance(states, list) else []


def _hash(parts: Iterable[str]) -> str:
    key = hashlib.sha256()
    for part in parts:
        key.update(f"{part}\0".encode("utf-8", "surrogateescape"))
    return key.hexdigest()[:16]


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a tokenizer writes for a text, and after it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = str(backend.to_str()) if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return f"{tokenizer.eos_token_id} {words}"
