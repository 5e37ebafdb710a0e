"""Strategies that choose the global heads for a budget, one idea a file; ``proposal.registry`` lists them."""
