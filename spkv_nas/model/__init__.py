"""Floor 2: gates, attention hook and layouts on Hugging Face models, and their checkpoints."""
