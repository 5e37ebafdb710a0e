"""Selection text: the documents that heads or layouts were selected on, in files that are named by their content.

``probe``, ``score`` and ``search`` write ``selection-<digest>.txt`` beside their tables: a line per document. A layout
names the digest of its head scores' file in its provenance, and ``propose`` writes a copy beside the layouts. So what
selected a layout is known from the layout, whatever became of the probe.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from spkv_nas.base.files import write_atomic

SELECTION = "selection"  # key of the digest in records and in a layout's provenance
PATTERN = f"{SELECTION}-*.txt"

Selection = frozenset[str]  # documents, as ``DocumentInfo.text_id``


def digest(selection: Selection) -> str:
    """Return 16 hexadecimal digits that identify a set of documents."""
    return hashlib.sha256(_text(selection).encode()).hexdigest()[:16]


def write_selection(folder: Path, selection: Selection) -> str:
    """Write documents to a folder, which may have those of other results, and return their digest."""
    name = digest(selection)
    write_atomic(folder / f"{SELECTION}-{name}.txt", _text(selection))
    return name


def read_selection(name: object, folders: Iterable[Path]) -> Selection | None:
    """Return the documents with a digest from the first folder that has them undamaged; None if none has."""
    for folder in folders:
        file = folder / f"{SELECTION}-{name}.txt"
        if file.is_file():
            selection = frozenset(file.read_text(errors="replace").split())
            if digest(selection) == name:
                return selection
    return None


def _text(selection: Selection) -> str:
    return "".join(f"{identity}\n" for identity in sorted(selection))
