"""Measure NLL against density at many thresholds: command ``evaluate sweep``."""
