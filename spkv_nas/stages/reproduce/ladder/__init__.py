"""Draw the FLOPs of the paper's model ladder: command ``reproduce ladder``."""
