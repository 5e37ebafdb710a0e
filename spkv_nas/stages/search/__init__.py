"""Search for layouts: command ``search``."""
