"""Upper limits of values in files and options, far beyond practical use.

Larger values would exhaust the memory or fail inside a library.
"""

from __future__ import annotations

MAX_WHOLE = 2**53  # integers up to here are exact in float64, in which numbers are read and summed
MAX_WINDOW = 2**31 - 1  # kernels use 32-bit integers
MAX_BLOCK_SIZE = 2**24  # tokens
MAX_BATCH = 2**24  # sequences
MAX_SIZE = 2**20  # channels of a head, or heads of a layer
MAX_RANK = 2**16  # of a low-rank adapter
MAX_STEPS = 10**9
MAX_REPEATS = 10_000  # seeds, thresholds, random layouts
MAX_SEED = 2**32 - 1 - MAX_REPEATS  # numpy's seeds have 32 bits; repetitions increment the seed
MAX_SHOWN = 1e9  # of a measured number: the range that a figure's axis can show
