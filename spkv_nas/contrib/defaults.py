"""Default values that both help texts and functions use. Imports nothing, because every ``--help`` loads it."""

# signals
REGRESSION_LAYOUTS = 200  # number of random layouts to score

# evaluate
RULER_SAMPLES = 100  # per task and length
LONGPPL_SHORT, LONGPPL_ALPHA, LONGPPL_BETA = 4096, 2.0, -2.0  # values of the LongPPL authors
LONGPPL_LENGTH = 1 << 15  # maximum tokens per text
AGREEMENT_TOKENS = 16_384  # tokens of prompts and continuations
DRAFT_TOKENS = (1, 2, 4, 8)  # tokens that a model drafts for each pass of the dense model
BASELINE_TOKENS = 16_384  # tokens of text to evaluate on
BASELINE_CHUNK = 16  # tokens between two evictions, as in the paper

# reproduce
PAPER = "paper"  # default name of results about the paper's model ladder
PALINDROME_STEPS, PALINDROME_BATCH, PALINDROME_WINDOW = 500, 32, 32
LADDER_DENSITY = 0.2  # density in the figure of FLOPs over the ladder
SAMPLER = "surrogate"  # of a search
