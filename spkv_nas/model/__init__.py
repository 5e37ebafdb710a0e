"""Gates, attention and layouts on Hugging Face models, and their checkpoints, cache, export and generation."""
