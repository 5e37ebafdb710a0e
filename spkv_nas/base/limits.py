"""The highest values that files and options may say, far beyond any use.

What lies above them would fill the memory, or end in an error of a library.
"""

from __future__ import annotations

MOST_WHOLE = 2**53  # beyond it float64, in which numbers are read and added up, skips some
MOST_WINDOW = 2**31 - 1  # kernels take 32 bits
MOST_BLOCK_SIZE = 2**24  # tokens
MOST_BATCH = 2**24  # sequences
MOST_SIZE = 2**20  # of a head, or heads of a layer
MOST_RANK = 2**16  # of an adapter
MOST_STEPS = 10**9
MOST_REPEATS = 10_000  # seeds, thresholds, random layouts
MOST_SEED = 2**32 - 1 - MOST_REPEATS  # numpy's have 32 bits; repetitions count up
MOST_SHOWN = 1e9  # of a measured number: what a figure can still show an axis of
