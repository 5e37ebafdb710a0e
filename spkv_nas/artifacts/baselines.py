"""Names of what ``baselines`` measures, and the columns of its table. Imports nothing: every help reads it."""

STREAMING, RANDOM, KVZAP, H2O, EXPECTED = "streaming", "random", "kvzap", "h2o", "expected-attention"
METHODS = (STREAMING, RANDOM, KVZAP, H2O, EXPECTED)

EXACT, KVPRESS = "exact", "kvpress"
PROTOCOLS = (EXACT, KVPRESS)

COLUMNS = (
    "method", "sinks", "target_density", "density", "tau", "nll", "delta_nll_percent", "delta_nll_standard_error",
)  # fmt: skip
