"""Estimate what stages and attention cost: commands ``plan`` and ``plan attention``."""
