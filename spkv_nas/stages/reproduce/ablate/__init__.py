"""Train the paper's ablations: command ``reproduce ablate``."""
