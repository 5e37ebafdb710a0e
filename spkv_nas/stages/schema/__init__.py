"""Print the JSON Schema of a kind of file: command ``schema``."""
