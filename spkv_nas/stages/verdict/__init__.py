"""Decide whether candidates keep up with a dense model: command ``verdict``."""
