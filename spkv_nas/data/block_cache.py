"""Cache the token blocks of a text in a folder named by the content of its documents.

The content is only known once the text has been read. To avoid reading it at every start, the folder also stores the
state (size and times) of the files that it was read from; a text is read again only if its state is new.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path

from spkv_nas.base import errors, files, locks
from spkv_nas.base.progress import Reporter
from spkv_nas.data import config, readers
from spkv_nas.data.sources import Document
from spkv_nas.data.tokenizer import Tokenizer, boundaries

_STATES = "sources.json"  # per folder: hashes of source states, newest first
_MAX_STATES = 16
_FORMAT = "4"  # version of how texts become blocks


class BlockCache:
    """Cache folders of one text under ``root``."""

    def __init__(
        self,
        root: Path,
        sources: Iterable[str | config.SourceConfig],
        base: Path,
        tokenizer: Tokenizer,
        settings: str,
        block_size: int,
        separator: str,
        bos: config.Bos,
        documents: str = config.JOINED,
    ) -> None:
        """Describe the text: its sources, relative to ``base``, and all else that determines its blocks.

        ``settings`` is everything that no other argument names. ``tokenizer.boundaries`` describes ``separator``,
        ``bos`` and ``documents``.
        """
        self.root, self.tokenizer, self.block_size = root, tokenizer, block_size
        # tokens that every block begins with, and those after each document
        self.boundaries = boundaries(tokenizer, separator, bos, block_size, documents)
        self._sources, self._base = list(sources), base
        self._decided = (_FORMAT, fingerprint(tokenizer), f"{block_size} {settings} {self.boundaries}")

    def find_or_write(self, has_all: Callable[[Path], bool], write: Callable[[], Path], reporter: Reporter) -> Path:
        """Return the folder of the current text if ``has_all`` accepts one, else ``write`` it, one process at once."""
        if (folder := self._find(has_all)) is not None:
            return folder
        with locks.locked(self.root, "reads and tokenises the text", reporter.announce):
            # Look again under the lock, as another process may have written the text
            return self._find(has_all) or write()

    def _find(self, has_all: Callable[[Path], bool]) -> Path | None:
        for file in sorted(self.root.glob(f"*/{_STATES}")):
            if self._state in _read_states(file) and has_all(file.parent):
                return file.parent
        return None

    @property
    def partial(self) -> Path:
        """Return the folder for blocks in progress."""
        return self.root / ".partial"

    def folder(self, content: "ContentKey") -> Path:
        """Return the folder of the text with this content, which holds the text in its current state."""
        folder = self.root / content.name(self._decided)
        states = [state for state in _read_states(folder / _STATES) if state != self._state]
        files.write_json(folder / _STATES, {"states": [self._state, *states][:_MAX_STATES]})
        return folder

    @cached_property
    def _state(self) -> str:
        """Return a hash of the current state of the sources."""
        states = [readers.open_source(source, self._base).identity for source in self._sources]
        key = hashlib.sha256()
        for part in (*states, *self._decided):
            key.update(f"{part}\0".encode("utf-8", "surrogateescape"))
        return key.hexdigest()[:16]


class ContentKey:
    """Hash of a text's documents and their names, which the blocks keep."""

    def __init__(self) -> None:
        """Start without documents."""
        self._key = hashlib.sha256()

    def pass_on(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Add each document, and yield it."""
        for document in documents:
            self._key.update("\0".join([document.id, document.domain, document.label, ""]).encode())
            yield document

    def name(self, decided: Iterable[str]) -> str:
        """Return 16 hexadecimal digits for the documents so far and the values of ``decided``."""
        key = self._key.copy()
        for part in decided:
            key.update(part.encode())
        return key.hexdigest()[:16]


def _read_states(file: Path) -> list[str]:
    """Read the states of a folder; empty for a missing or damaged file, so that the text is read again."""
    try:
        states = files.read_json(file, "states of text sources").get("states")
    except errors.UserError:
        return []
    return [str(state) for state in states] if isinstance(states, list) else []


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a string that identifies how a tokenizer encodes text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
