"""Score layouts on a checkpoint without training: command ``score``."""
