"""Export checkpoints with a layout, in the form that a target, such as a native architecture, needs."""
