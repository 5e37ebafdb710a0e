"""Show, compare and convert layout files: commands ``layout show``, ``diff`` and ``convert``."""
