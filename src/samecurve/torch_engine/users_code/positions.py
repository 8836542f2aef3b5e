"""How far iterators, generators and caches have gone: what can be seen of them."""

import pickle
import warnings
from contextlib import suppress
from types import GeneratorType
from typing import Any, NamedTuple


class Iterator(NamedTuple):
    """An iterator of Python's: of a list, of itertools. state: from which it can be made again"""

    state: bytes


class Generator(NamedTuple):
    """A generator, which goes on and never back. state: the line and the variables that it is at"""

    state: str


class Cache(NamedTuple):
    """A cache of functools. misses: the calls for which it had no answer"""

    misses: int


Position = Iterator | Generator | Cache


def position_of(value: Any) -> Position | None:
    """None: the value is none of these, or can't be looked at."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return Generator(f"{frame.f_lasti} {frame.f_locals}" if frame else "")
    if has_cache(value):
        return Cache(value.cache_info().misses)
    is_iterator = hasattr(type(value), "__next__")
    if not is_iterator or type(value).__module__ not in {"builtins", "itertools"}:
        return None
    with warnings.catch_warnings(), suppress(Exception):  # of what it goes through
        warnings.simplefilter("ignore")  # a later Python's, which looks no further
        return Iterator(pickle.dumps(value))
    return None


def made_again(position: Iterator) -> Any:
    """An iterator that goes on from there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pickle.loads(position.state)


def has_cache(value: object) -> bool:
    return hasattr(value, "cache_info") and hasattr(value, "cache_clear")
