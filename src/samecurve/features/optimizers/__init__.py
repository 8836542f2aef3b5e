"""The optimizers of the config beside adamw and sgd, one folder each (core/optimizer_spec.py)."""
