"""RULER's 13 tasks, generated on the fly as pure functions of seed, index, length and tokenizer."""
