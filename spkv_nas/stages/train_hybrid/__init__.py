"""Retrain layouts and compare them: command ``train-hybrid``."""
