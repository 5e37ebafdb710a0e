"""Signals that say which KV heads need global attention, density first, each measured on text."""
