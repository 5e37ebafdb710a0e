"""Compare how probes rank the heads: command ``compare``."""
