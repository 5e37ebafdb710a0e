"""Evaluate checkpoints with hard gates on downstream tasks, as defined and scored by lm-eval."""
