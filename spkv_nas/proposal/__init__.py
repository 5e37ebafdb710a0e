"""Propose layouts for a budget of global heads: strategies, constraints, coverage, uncertainty, format conversion."""
