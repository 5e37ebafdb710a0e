"""Default values that both help texts and functions use. Imports nothing, because every ``--help`` loads it.

A number is here if the option itself defaults to None because another value (the checkpoint's or the recipe's) may
replace it. Options with a fixed default define it themselves.
"""

BLOCK_SIZE = 512  # tokens per block of text of a recipe
CONTEXT = 2048  # tokens per block of --data, or the model's context if shorter
HELDOUT_TOKENS = 500_000  # maximum of a recipe, and assumed by a plan without a text

# probing
PRICED_STEPS = 160  # steps for gates with a sparsity penalty on a frozen model
# Signal whose heads have the lowest NLL after retraining (reports/study)
RECOMMENDED = "head-gates"
LEARNING_TOKENS = 2048  # per step, of priced gates and of head gates
# Of head gates and duo: unchanged model, mixture forward, backward without weight gradients
FROZEN_STEP_PASSES = 3
# 25 and 100 steps choose the same heads, except one in eighteen (reports/study)
HEAD_GATE_STEPS = 50
DUO_STEPS = 200
DUO_STEP_BLOCKS = 2
SCORING_TOKENS = 12_288  # tokens of text for signals that score layouts
# Share of a head's attention on the first tokens above which it has an attention sink
STRONG_SINK = 0.3
SINK_TOKENS = 2048  # tokens of text that attention sinks are measured on
ABLATION_TOKENS = 4096  # for validating a table; reports/LOG.md has the accuracy

# proposal
SOLUTIONS_APART = 4  # heads in which two of several solutions differ

# evaluation
SCORE_TOKENS = 32_768  # tokens of text that layouts are scored on
TAU_POINTS = 13  # thresholds in a range, endpoints included

# training and cost
FIRST_STEPS = 160  # per model in a generated recipe
