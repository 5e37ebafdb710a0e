"""Measure a score of every KV head: command ``probe``."""
