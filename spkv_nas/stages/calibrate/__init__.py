"""Measure what attention costs on this machine: command ``calibrate``."""
