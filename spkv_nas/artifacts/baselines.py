"""Names of the pruning methods and protocols of ``baselines``. Imports nothing, because every ``--help`` loads it."""

STREAMING, RANDOM, KVZAP, H2O, EXPECTED = "streaming", "random", "kvzap", "h2o", "expected-attention"
METHODS = (STREAMING, RANDOM, KVZAP, H2O, EXPECTED)

EXACT, KVPRESS = "exact", "kvpress"
PROTOCOLS = (EXACT, KVPRESS)

NEAR_DENSITY = 0.01  # SP-KV is compared at a target density if its own density is within this distance of it
