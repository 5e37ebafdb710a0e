"""Kinds and units of head scores, which a table's record names. Imports nothing: every ``--help`` loads it."""

DENSITY = "density"  # share of keys that gates keep, in [0, 1]; depends on a threshold
SHARE = "share"  # any other number in [0, 1], shown in percent
GAIN = "gain"  # what a head saves; signed
SCORE = "score"  # any finite number
KINDS = (DENSITY, SHARE, GAIN, SCORE)
# Whether single heads or whole layers were measured
HEAD = "head"
LAYER = "layer"
GRANULARITIES = (HEAD, LAYER)

DENSITY_UNIT = "share of tokens kept"
SHARE_UNIT = "share in [0, 1]"  # of shares whose signal names none
GATE_UNIT = "gate in [0, 1]"
ALPHA_UNIT = "alpha in [0, 1]"
ATTENTION_UNIT = "share of attention"
NATS = "nats per token"
