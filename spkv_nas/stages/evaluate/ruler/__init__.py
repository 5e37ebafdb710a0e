"""Score RULER's tasks: command ``evaluate ruler``."""
