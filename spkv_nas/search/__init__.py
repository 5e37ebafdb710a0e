"""The search for layouts: space, samplers, queue of work, driver, results. Knows no model."""
