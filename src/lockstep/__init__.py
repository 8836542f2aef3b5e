"""Train one model on one device or on many, with the same loss curve."""

__version__ = "0.1.0"
