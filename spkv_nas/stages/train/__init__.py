"""Train a recipe models: command ``train``."""
