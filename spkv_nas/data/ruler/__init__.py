"""RULER's 13 tasks, made on the spot: pure functions of seed, index, length and tokenizer."""
