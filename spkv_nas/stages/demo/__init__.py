"""Run the whole workflow on the embedded reference: command ``demo``."""
