"""Run downstream tasks: command ``evaluate tasks``."""
