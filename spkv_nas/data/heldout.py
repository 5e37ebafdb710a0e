"""Decide which share of the documents is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Announce, silent
from spkv_nas.data.config import DataConfig
from spkv_nas.data.pieces import piece_size
from spkv_nas.data.sources import documents

_MOST_PER_TOKEN = 8  # characters; few tokenizers reach 6
RULE = 2  # changes with which tokens are held out, so that results of another choice are not taken for these
_LEAST = 2  # held-out documents: one alone gives no standard error


def heldout_share(config: DataConfig, base: Path, announce: Announce = silent) -> float:
    """The share of hashes (``sources.heldout``) at which documents are held out: that of ``config``, unless it leaves
    less than one block, or a single document, to held-out text, or less than one block to training.

    Then it is the nearest share at which both have enough, which ``announce`` is told. Read are documents up to where
    both have: few, of a large text.

    Raises:
        UserError: the text is too short to be parted.
    """
    least = _MOST_PER_TOKEN * config.block_size  # characters of a block
    found: list[tuple[int, int]] = []  # (hash, characters) of each document
    number = held = kept = 0
    for document in documents(config.sources, base, piece=piece_size(config.block_size)):
        key, length = int(document.id[:8], 16), len(document.text)
        found.append((key, length))
        if key < config.heldout * 2**32:
            number, held = number + 1, held + length
        else:
            kept += length
        if number >= _LEAST and held >= least and kept >= least:
            return config.heldout
    best = _parted(sorted(found), number, least)
    if best != number:
        announce(
            f"data.heldout {config.heldout:g} would hold out {number} of {len(found)} documents: {best} are, so that "
            "there is text to train on and text to measure on"
        )
    return (sorted(found)[best - 1][0] + 1) / 2**32


def _parted(found: list[tuple[int, int]], number: int, least: int) -> int:
    """How many of ``found``, by hash, to hold out: as close to ``number`` as gives both parts enough."""
    if not found:
        raise UserError("the text is empty: no document in any source")
    if len(found) == 1:
        raise UserError(
            f"the text is one document of {found[0][1]} characters, too short to hold out a part of it\n"
            "give more text, or smaller blocks (--block-size; data.block_size in a recipe): a piece of it has four"
        )
    lengths = np.cumsum([length for _, length in found])
    first = max(_LEAST, int(np.searchsorted(lengths, least)) + 1)
    last = min(len(found) - 1, int(np.searchsorted(lengths, lengths[-1] - least, side="right")))
    return min(max(number, first), max(last, 1))
