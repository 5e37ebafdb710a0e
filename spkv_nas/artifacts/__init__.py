"""Files that the pipeline stages exchange: layouts, head scores, comparisons, gate configurations. Needs no torch."""
