"""Train the paper's toy task: command ``reproduce palindrome``."""
