"""Floor 3: training phases, the trainer, and the runs of a recipe (dense checkpoint, then its branches)."""
