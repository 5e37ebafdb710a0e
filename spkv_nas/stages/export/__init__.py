"""Export a checkpoint as a Hugging Face folder: command ``export``."""
