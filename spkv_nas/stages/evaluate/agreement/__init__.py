"""Measure the agreement of a checkpoint's tokens with a dense model's: command ``evaluate agreement``."""
