"""Negative log-likelihood on held-out text, its paired comparison over documents, and rankings."""
