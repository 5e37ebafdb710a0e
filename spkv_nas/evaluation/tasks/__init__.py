"""Downstream tasks, as lm-eval defines and scores them, answered by a checkpoint with its gates hard."""
