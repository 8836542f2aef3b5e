"""The config's optimizers beside adamw and sgd: their updates look at more than one number."""
