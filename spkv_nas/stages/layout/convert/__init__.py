"""Convert a layout to another format: command ``layout convert``."""
