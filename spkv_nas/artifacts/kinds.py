"""Kinds and units of head scores. Imports nothing, because every ``--help`` loads it.

The record of a table (``probe.yaml``) names both, so that a table shows without its signal being installed.
"""

DENSITY = "density"  # share of keys that gates keep, in [0, 1]; depends on a threshold
SHARE = "share"  # any other number in [0, 1], shown in percent
GAIN = "gain"  # what a head saves; signed
SCORE = "score"  # any finite number
KINDS = (DENSITY, SHARE, GAIN, SCORE)

DENSITY_UNIT = "share of tokens kept"
SHARE_UNIT = "share in [0, 1]"  # of shares whose signal names none
GATE_UNIT = "gate in [0, 1]"
ALPHA_UNIT = "alpha in [0, 1]"
ATTENTION_UNIT = "share of attention"
NATS = "nats per token"
