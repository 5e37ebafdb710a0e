"""Compare two layouts: command ``layout diff``."""
