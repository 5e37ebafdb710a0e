"""Choose the share of documents that is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Announce, silent
from spkv_nas.data.config import DataConfig
from spkv_nas.data.sources import documents
from spkv_nas.data.tokenizer import piece_size

_MAX_PER_TOKEN = 8  # upper bound of characters per token; few tokenizers reach 6
RULE = 2  # version of the choice of held-out tokens, so that results of another choice are not reused
_MIN_DOCUMENTS = 2  # minimum number of held-out documents, as a single one gives no standard error


def heldout_share(config: DataConfig, base: Path, announce: Announce = silent) -> float:
    """Return the share of hashes (``sources.heldout``) below which documents are held out.

    It is that of ``config``, unless this leaves less than one block or a single document to the held-out text, or less
    than one block to training. Then it is the nearest share that gives both enough, which ``announce`` is told.
    Documents are read only until both parts have enough, which takes few of a large text. Raises ``UserError`` if a
    text is too short to be split.
    """
    block_characters = _MAX_PER_TOKEN * config.block_size  # characters of a block
    # Read documents until both parts have enough
    hashed: list[tuple[int, int]] = []  # (hash, characters) of each document
    num_held = held_characters = kept_characters = 0
    for document in documents(config.sources, base, piece=piece_size(config.block_size)):
        key, length = int(document.id[:8], 16), len(document.text)
        hashed.append((key, length))
        if key < config.heldout * 2**32:
            num_held, held_characters = num_held + 1, held_characters + length
        else:
            kept_characters += length
        if num_held >= _MIN_DOCUMENTS and held_characters >= block_characters and kept_characters >= block_characters:
            return config.heldout
    # Choose the nearest number of documents that gives both parts enough
    num_chosen = _parted(sorted(hashed), num_held, block_characters)
    if num_chosen != num_held:
        announce(
            f"data.heldout {config.heldout:g} would hold out {num_held} of {len(hashed)} documents; "
            f"{num_chosen} are held out, so that text is left both to train on and to evaluate on"
        )
    # Hold out all hashes up to that of the last chosen document
    return (sorted(hashed)[num_chosen - 1][0] + 1) / 2**32


def _parted(hashed: list[tuple[int, int]], number: int, least: int) -> int:
    """Return how many of the sorted (hash, characters) to hold out: near ``number``, with ``least`` on each side."""
    if not hashed:
        raise UserError("the text is empty: no document in any source")
    if len(hashed) == 1:
        raise UserError(
            f"the text is one document of {hashed[0][1]} characters, too short to hold out a part\n"
            "use more text, or smaller blocks (--block-size; data.block_size in a recipe); each part needs four"
        )
    # Leave both parts enough text
    lengths = np.cumsum([length for _, length in hashed])
    lowest = max(_MIN_DOCUMENTS, int(np.searchsorted(lengths, least)) + 1)
    highest = min(len(hashed) - 1, int(np.searchsorted(lengths, lengths[-1] - least, side="right")))
    return min(max(number, lowest), max(highest, 1))
