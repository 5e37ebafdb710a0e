"""Cost of attention: FLOPs, memory and time, from formulas, bounds or measurements; scaling ladder and scaling law."""
