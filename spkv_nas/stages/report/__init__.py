"""Write the page and the figures: command ``report``."""
