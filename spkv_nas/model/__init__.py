"""Gates, attention and layouts on Hugging Face models; their checkpoints, cache, export and generation."""
