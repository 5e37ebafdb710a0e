"""The search for layouts by Optuna: space, sampler, queue of work, driver, results. Knows no model."""
