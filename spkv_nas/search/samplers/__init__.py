"""Samplers of layouts, one a file; ``search.registry`` lists them."""
