"""How much work a chat template does, counted in cells.

A cell is about a character that is read or made. The count depends on the template and on the
conversation alone, so that a template is refused on every machine or on none.
"""

import math
from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from typing import Any

from jinja2.utils import Namespace

NODE = 8  # cells of a value or an operation, beside its characters
_NESTED = 16  # cells of a value that is looked for in a container
_CONTAINERS = (list, tuple, set, frozenset, deque, KeysView, ValuesView, ItemsView)
_LEAST = 1 << 24  # cells that any conversation may take: about a second, 100 MB
_TIMES = 256  # cells for each cell of the conversation; ordinary templates take up to 30


class TemplateLimitError(Exception):
    """A chat template makes more text, or does more work, than any conversation needs."""


class Meter:
    """The cells that are spent while a template is compiled or rendered."""

    def __init__(self) -> None:
        self.spent = 0
        self._limit = math.inf
        self._inputs: tuple[Any, ...] = ()

    @contextmanager
    def limited(self, *inputs: Any, work: int = 0) -> Iterator[None]:
        """Limit what the block may spend.

        inputs: what the template is given. work: cells that are spent in any case.
        """
        self.spent, self._limit, self._inputs = work, _LEAST, inputs
        try:
            yield
        finally:
            self._limit, self._inputs = math.inf, ()

    def spend(self, cells: int) -> None:
        """Count cells before they are used. TemplateLimitError: there are too many."""
        self.spent += cells
        if self.spent > self._limit:
            self._allow_more()

    def _allow_more(self) -> None:
        """A long conversation may take more; few templates come to ask."""
        spent, inputs = self.spent, self._inputs
        self.spent, self._limit, self._inputs = 0, math.inf, ()
        self._limit = _LEAST + _TIMES * sum(self.weigh(each) for each in inputs)
        self.spent = spent
        if spent > self._limit:
            raise TemplateLimitError("the chat template makes too much text or loops too often")

    def read(self, value: Any) -> None:
        """Count the cells of a value that is read in full."""
        self.spend(len(value) if type(value) is str else self.weigh(value))

    def weigh(self, value: Any) -> int:
        """The cells of a value and of all that lies in it."""
        return self.measure(value)[0]

    def measure(self, value: Any) -> tuple[int, int]:
        """The cells of a value, and how deep it is nested.

        A value that lies at two places counts twice, as it does in text.
        """
        cells, depth, level = 0, 0, [value]
        while level:
            depth += 1
            cells += _NESTED * len(level)
            inner: list[Any] = []
            for each in level:
                kind = type(each)
                if kind is str:
                    cells += len(each)
                elif kind is dict:
                    inner += each
                    inner += each.values()
                elif kind is list or kind is tuple:
                    inner += each
                elif each is None:
                    pass
                elif isinstance(each, int):
                    cells += each.bit_length() >> 2
                elif isinstance(each, str | bytes):
                    cells += len(each)
                else:
                    inner += _parts(each)
            if self.spent + cells > self._limit:
                self.spend(cells)
                self.spent -= cells  # the caller counts them
            level = inner
        return cells, depth


def _parts(value: Any) -> Iterable[Any]:
    """The values in a container; none for any other value."""
    if isinstance(value, Namespace):  # it shows a template its own attributes only
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return value if isinstance(value, _CONTAINERS) else ()
