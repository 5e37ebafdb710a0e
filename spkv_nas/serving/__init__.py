"""Serve exports in inference engines, and check that an engine computes what the model does."""
