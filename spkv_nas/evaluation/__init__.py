"""Floor 3: negative log-likelihood on held-out text, and its paired comparison over documents."""
