"""Continue a prompt with a checkpoint: command ``generate``."""
