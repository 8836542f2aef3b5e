"""The strategy of one device: the base of all strategies, as it is."""

from samecurve.torch_engine.strategies.base import Strategy


class Single(Strategy):
    """The strategy of one device."""
