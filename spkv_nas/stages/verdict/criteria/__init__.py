"""Define the built-in criteria of a verdict, one per file."""
