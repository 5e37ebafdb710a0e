"""Default values that a help text names and a function uses. Imports nothing: every help reads it.

A number stands here if the option's own default is None because another value may take its place (the checkpoint's, the
recipe's). Where the option has the number as its default, the option is the one place.
"""

from __future__ import annotations

BLOCK_SIZE = 512  # tokens of a block of text
HELDOUT_TOKENS = 500_000  # of a recipe at most, and of a plan without a text

# probing
PRICED_STEPS = 160  # steps of priced gates on a frozen model
HEAD_GATE_STEPS = 50  # 25 and 100 choose the same heads, but for one in eighteen (reports/study)
LEARNING_TOKENS = 2048  # of a step of priced gates and of head gates
DUO_STEPS = 200
REGRESSION_LAYOUTS = 200  # random layouts that are scored
SCORING_TOKENS = 12_288  # of text for signals that score layouts
GAIN_TOKENS = 4096  # that judge a table; how sure that is: reports/LOG.md

# evaluation
TAU_POINTS = 13  # thresholds of a range, its ends included
RULER_SAMPLES = 100  # of a task at a length
LONGPPL_SHORT, LONGPPL_ALPHA, LONGPPL_BETA = 4096, 2.0, -2.0  # the authors'
LONGPPL_LENGTH = 1 << 15  # tokens of a text at most
BASELINE_TOKENS = 16_384  # of text that is read
BASELINE_CHUNK = 16  # tokens read between two evictions, as in the paper

# training and cost
FIRST_STEPS = 160  # of each model of a first recipe
PALINDROME_STEPS, PALINDROME_BATCH, PALINDROME_WINDOW = 500, 32, 32
LADDER_DENSITY = 0.2  # of the figure of FLOPs over the ladder
