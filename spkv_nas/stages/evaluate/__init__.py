"""Evaluate a checkpoint: the subcommands of ``evaluate``, one folder each."""
