"""Check that an inference engine computes what an exported model does: command ``serve-check``."""
