"""The optimizers of engine torch: adamw, sgd, a task's own, and what the config's others share."""
