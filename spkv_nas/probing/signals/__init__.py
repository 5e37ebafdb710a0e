"""Built-in signals, one in a file. Nothing here imports torch before a signal is measured."""
