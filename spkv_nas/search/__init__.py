"""Floor 3: strategies that propose layouts for a budget, and density coverage."""
