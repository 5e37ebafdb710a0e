"""Upper limits of values in files and options, far beyond practical use.

Larger values would exhaust the memory or fail inside a library.
"""

from __future__ import annotations

MOST_WHOLE = 2**53  # integers up to here are exact in float64, in which numbers are read and summed
MOST_WINDOW = 2**31 - 1  # kernels use 32-bit integers
MOST_BLOCK_SIZE = 2**24  # tokens
MOST_BATCH = 2**24  # sequences
MOST_SIZE = 2**20  # channels of a head, or heads of a layer
MOST_RANK = 2**16  # of a low-rank adapter
MOST_STEPS = 10**9
MOST_REPEATS = 10_000  # seeds, thresholds, random layouts
MOST_SEED = 2**32 - 1 - MOST_REPEATS  # numpy's seeds have 32 bits; repetitions increment the seed
MOST_SHOWN = 1e9  # of a measured number: the range that a figure's axis can show
