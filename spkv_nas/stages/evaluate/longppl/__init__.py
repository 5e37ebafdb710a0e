"""Measure LongPPL: command ``evaluate longppl``."""
