"""Measure held-out NLL: command ``evaluate nll``."""
