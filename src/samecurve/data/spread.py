"""A part of a source: samples that are spread evenly over it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import Source


def spread_out(source: Source, count: int | None) -> Source | None:
    """The held-out samples that an evaluation reads; None: there are none.

    count: how many at most; None: all
    """
    if not len(source) or count == 0:
        return None
    return Spread(source, min(len(source), count or len(source)))


class Spread:
    """`count` samples spread evenly over a source."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        return self._source[np.asarray(ids) * len(self._source) // self._count]
