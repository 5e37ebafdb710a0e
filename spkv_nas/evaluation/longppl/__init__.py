"""LongPPL: perplexity of the tokens that only a long context makes likely."""
