"""Search for layouts: search space, samplers, task queue, driver and results. Independent of any model."""
