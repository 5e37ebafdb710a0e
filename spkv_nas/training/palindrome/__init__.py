"""The paper's toy task: reverse a list from beyond the window."""
