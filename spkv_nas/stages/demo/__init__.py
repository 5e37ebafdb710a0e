"""Run the whole path on the embedded reference: command ``demo``."""
