"""Recipes and their runs: the dense checkpoint, its branches, comparisons of them."""
