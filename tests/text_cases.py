"""Small texts in files, and a tokenizer that records its input."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from spkv_nas.data.config import DataConfig


class Bytes:
    """Tokenizer whose tokens are bytes; it stores the texts that it has tokenised."""

    eos_token_id = 256
    backend_tokenizer = SimpleNamespace(to_str=lambda: "bytes")

    def __init__(self, patience: int = 10**9) -> None:
        self.texts: list[str] = []
        self._patience = patience

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[np.ndarray]]:
        if len(self.texts) + len(texts) > self._patience:
            raise KeyboardInterrupt
        self.texts += texts
        return {"input_ids": [np.frombuffer(text.encode(), np.uint8) for text in texts]}


def bytes_tokenizer(patience: int = 10**9) -> Any:
    """Return a byte tokenizer, typed as transformers', that is interrupted after ``patience`` texts."""
    return Bytes(patience)


def prose(number: int, start: int = 0) -> str:
    """Return a number of short paragraphs that differ."""
    return "".join(
        f"paragraph {i} has {i * i % 97} words\nin two lines\n\n"
        for i in range(start, start + number)
    )


def write_files(folder: Path, number: int) -> Path:
    folder.mkdir()
    for i in range(number):
        (folder / f"{i:03}.txt").write_text(prose(6, 100 * i))
    return folder


def sixty_documents(base: Path) -> DataConfig:
    """Write sixty documents, some of them held out."""
    return DataConfig(sources=[str(write_files(base / "text", 60))], block_size=64, heldout=0.3)
