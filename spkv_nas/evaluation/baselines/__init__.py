"""Pruning after the fact: what rules cost that evict keys from the cache of a model trained without them."""
