"""Layouts for a budget: strategies, constraints, coverage, how sure they are, and the formats of other projects."""
