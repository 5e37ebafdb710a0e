"""Write a first recipe for a model and a text: command ``init``."""
