"""Samplers of the layout search: names and descriptions. Imports nothing, because every ``--help`` loads it."""

SURROGATE, DENSITY, TPE, RANDOM = "surrogate", "density", "tpe", "random"
SAMPLERS = {  # by name: what the sampler draws layouts by
    SURROGATE: "a model of all scores so far",
    DENSITY: "TPE, started from the strategies and completed by density",
    TPE: "the same without densities",
    RANDOM: "heads at random",
}
