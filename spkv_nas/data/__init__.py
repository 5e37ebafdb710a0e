"""Text sources, tokenizers, and the token blocks that training and probing read."""
