"""LongPPL: perplexity of the tokens that only the long context makes likely."""
