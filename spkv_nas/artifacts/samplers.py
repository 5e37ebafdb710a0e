"""What draws the layouts of a search, by the names of options and tables. Imports nothing: every help reads it."""

SURROGATE, DENSITY, TPE, RANDOM = "surrogate", "density", "tpe", "random"
SAMPLERS = {  # what draws layouts, and by what
    SURROGATE: "a model of all scores so far",
    DENSITY: "TPE, started from the strategies and completed by density",
    TPE: "the same without densities",
    RANDOM: "heads at random",
}
