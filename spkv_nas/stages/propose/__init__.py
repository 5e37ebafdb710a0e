"""Propose layouts for a budget of global heads: command ``propose``."""
