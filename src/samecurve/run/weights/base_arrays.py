"""The arrays of a frozen base by a checkpoint's names, alone or beneath a checkpoint's arrays."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.config.sections import Config
from samecurve.core.protocols import Checkpoint, StoredArrays
from samecurve.core.system.cache import cache_home
from samecurve.run.directory import Run
from samecurve.run.weights.base_files import Base
from samecurve.run.weights.foreign_weights import SourceArray
from samecurve.run.weights.initial_weights import fitting_arrays
from samecurve.run.weights.opened_checkpoint import ArrayView, Weights
from samecurve.tasks import open_task
from samecurve.tasks.adapter import TaskAdapter

_PREFIX = "model/"


def base_weights(run: Run, task: object, config: Config) -> Checkpoint | None:
    """The base's arrays as those of a checkpoint, read when asked for; None: the run has no base.

    Base.check_unchanged() compares the hashes; this function does not.

    task: the config's task, where it is open
    """
    base = Base.kept_by(run)
    if base is None:
        return None
    opened = task if isinstance(task, TaskAdapter) else open_task(config, cache_home())
    arrays, _ = fitting_arrays(Path(base.path), config, opened.model_arrays(), opened.task)
    return Checkpoint(
        path=base.path, step=0, epoch=0, consumed=0, arrays=_SourceArrays(arrays), loop={}
    )


class _SourceArrays(Mapping[str, NDArray[Any]]):
    """The arrays of a source, for readers of a checkpoint. A part of an array is cut out of it."""

    def __init__(self, arrays: Mapping[str, SourceArray]) -> None:
        self._arrays = {f"{_PREFIX}{name}": array for name, array in arrays.items()}

    def __getitem__(self, name: str) -> NDArray[Any]:
        return np.ascontiguousarray(self._arrays[name].read()).reshape(self.shape(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        box = tuple(slice(o, o + size) for o, size in zip(offsets, shape, strict=True))
        return np.ascontiguousarray(self[name][box])

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def with_adapter(base: Checkpoint, adapter: Checkpoint) -> Checkpoint:
    """The base's arrays, and the first ones of what is trained on it."""
    sources = (base.arrays, adapter.arrays)
    places = {name: (arrays, name) for arrays in sources for name in arrays}
    return replace(base, arrays=ArrayView(places))


def on_base(own: Weights, base: StoredArrays) -> ArrayView:
    """A model's arrays by name: those of a checkpoint, else those of its base."""
    of_base = {name.removeprefix(_PREFIX): (base, name) for name in base}
    places = {name: (own, name) for name in own}
    return ArrayView({**places, **of_base, **places})
