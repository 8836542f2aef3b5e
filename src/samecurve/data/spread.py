"""A part of a source: samples that are spread evenly over it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import Source


class Spread:
    """`count` samples spread evenly over a source."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        return self._source[np.asarray(ids) * len(self._source) // self._count]
