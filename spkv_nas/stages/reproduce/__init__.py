"""Reproduce the paper's experiments: command group ``reproduce``."""
