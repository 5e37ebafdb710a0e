"""Compute what attention costs: command ``plan attention``."""
