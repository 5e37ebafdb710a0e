"""Decide whether a model keeps up with a dense one, sample by sample, with an error rate (non-inferiority)."""
