"""Names of what ``baselines`` measures. Imports nothing: every help reads it."""

STREAMING, RANDOM, KVZAP, H2O, EXPECTED = "streaming", "random", "kvzap", "h2o", "expected-attention"
METHODS = (STREAMING, RANDOM, KVZAP, H2O, EXPECTED)

EXACT, KVPRESS = "exact", "kvpress"
PROTOCOLS = (EXACT, KVPRESS)

NEAR_DENSITY = 0.01  # SP-KV competes with the rules at a target density that it keeps within this
