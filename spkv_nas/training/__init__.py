"""Recipes and training runs: the dense checkpoint, its branches, and comparisons between branches."""
