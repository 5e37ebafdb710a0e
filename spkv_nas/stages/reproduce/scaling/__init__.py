"""Fit the paper's scaling law: command ``reproduce scaling``."""
