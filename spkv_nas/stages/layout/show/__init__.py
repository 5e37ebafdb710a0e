"""Print layouts as grids: command ``layout show``."""
