"""Compare with training-free cache pruning: command ``evaluate baselines``."""
