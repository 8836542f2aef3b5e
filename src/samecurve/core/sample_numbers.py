"""samecurve.rng(batch): random numbers that a loss or a metric asks for, under either engine.

They follow the samples of the microbatch in work: the same numbers on any devices, in any
microbatches, and, in float32 to some units in the last place, under either engine.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from samecurve.errors import UserError

# Any: an array of the engine's.


class SampleNumbers(Protocol):
    """Random numbers of a microbatch's rows, [rows, *shape]; each call draws new ones.

    dtype: "float32" or "float64".
    """

    def uniform(self, *shape: int, dtype: str = "float32") -> Any:
        """In [0, 1)."""
        ...

    def normal(self, *shape: int, dtype: str = "float32") -> Any:
        """Normal numbers of mean 0 and variance 1."""
        ...

    def integers(self, low: int, high: int, *shape: int) -> Any:
        """From low to high - 1; at most 2**31 of them."""
        ...

    def bernoulli(self, p: float, *shape: int) -> Any:
        """True with probability p."""
        ...


Provider = Callable[[], SampleNumbers | None]  # None: no microbatch of its is in work


class _Providers:
    """The providers of this process: each engine has microbatches of its own, thread by thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._providers: list[Provider] = []

    @contextmanager
    def serving(self, provider: Provider) -> Iterator[None]:
        with self._lock:
            self._providers = [*self._providers, provider]
        try:
            yield
        finally:
            with self._lock:
                others = list(self._providers)
                others.remove(provider)
                self._providers = others

    def numbers(self) -> SampleNumbers | None:
        served = (provider() for provider in reversed(self._providers))
        return next((numbers for numbers in served if numbers is not None), None)


_PROVIDERS = _Providers()  # of the process, as rng() is a function of a module
serving = _PROVIDERS.serving
current_numbers = _PROVIDERS.numbers


def rng(batch: Mapping[str, Any]) -> SampleNumbers:
    """Random numbers that follow the samples of the microbatch in work: [rows, *shape].

    batch: what the loss or the metrics were given; under jax it has one row.

    UserError: no microbatch is in work.
    """
    numbers = current_numbers()
    if numbers is None:
        raise UserError(
            f"samecurve.rng() is asked for numbers of {', '.join(batch) or 'no array'}, and no"
            " microbatch is in work",
            "call it in loss() or metrics(); for data, samecurve.sample_rng(id, epoch)",
            "task",
        )
    return numbers
