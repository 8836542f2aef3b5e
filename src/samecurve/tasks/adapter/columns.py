"""Columns: arrays with one row a sample, from what the data or a task's collate() gives.

In errors, `origin` names the source: "the data of MyTask.train_data()", "MyTask.collate()".
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.errors import UserError
from samecurve.tasks.adapter.returned import FORM, Columns, parameters_of

_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


class Collation:
    """A task's method collate(self, samples[, ids][, epoch]) -> {name: array}.

    name: the method, for errors: "MyTask.collate()"
    """

    def __init__(self, method: Callable[..., Any], name: str) -> None:
        self._method, self.name = method, name
        self._parameters = frozenset({"ids", "epoch"}) & parameters_of(method)
        self.by_epoch = "epoch" in self._parameters

    def __call__(self, samples: list[Any], ids: Ids, epoch: int) -> Columns:
        """The arrays of these samples. UserError: they have no names, or other numbers of rows."""
        by_name = {"ids": ids, "epoch": epoch}
        columns = self._method(samples, **{name: by_name[name] for name in self._parameters})
        if not isinstance(columns, Mapping) or not columns:
            raise UserError(
                f"{self.name} returns {type(columns).__name__}, not arrays by name",
                'a dict, such as {"tokens": tokens, "labels": labels}: each array has one row a'
                " sample",
                "task",
            )
        return columns_of(columns, len(ids), self.name)

    def samples_of(self, raw: Any, count: int, origin: str) -> list[Any]:
        """The samples that the method is given: items as they are, or a dict for each row of
        columns.
        """
        _check_form(raw, count, origin)
        if isinstance(raw, list):
            return raw
        for name, column in raw.items():
            length = len(column) if getattr(column, "ndim", 1) else 0
            if length != count:
                raise _wrong_length(str(name), (length,), count, origin)
        return [{name: column[row] for name, column in raw.items()} for row in range(count)]


def stacked(raw: Any, count: int, origin: str) -> Columns:
    """The arrays of data that has no collate(): columns as they are, or items stacked."""
    _check_form(raw, count, origin)
    if not isinstance(raw, list):
        return columns_of(raw, count, origin)
    if (columns := _alike(raw)) is not None:
        return columns
    items = [_named(item) for item in raw]
    names = list(items[0])
    if any(list(item) != names for item in items):
        raise UserError(
            f"{origin} gives items of unlike parts: some have {', '.join(names)}",
            "every item has the same names",
            "task",
        )
    parts = {name: _stack(name, [item[name] for item in items], origin) for name in names}
    return columns_of(parts, count, origin)


def _alike(items: list[Any]) -> Columns | None:
    """The columns of dicts of arrays that are all alike, as a picture data set gives them.

    None: the items are something else, which takes twice as long to stack, or is refused.
    """
    first = items[0]  # what follows runs once for each item, in C
    if set(map(type, items)) != {dict} or len(set(map(len, items))) > 1:
        return None
    columns = {}
    for name, value in first.items():
        try:
            values = list(map(itemgetter(name), items))
        except KeyError:
            return None
        column = _alike_arrays(values) if type(value) is np.ndarray else _alike_numbers(values)
        if type(name) is not str or column is None:
            return None
        columns[name] = column
    return columns


def _alike_arrays(values: list[Any]) -> NDArray[Any] | None:
    """Arrays of numbers of one type and shape, stacked; None: they are not."""
    if set(map(type, values)) != {np.ndarray}:
        return None
    kinds, shapes = set(map(_DTYPE, values)), set(map(_SHAPE, values))
    if len(kinds) > 1 or len(shapes) > 1 or shapes == {()} or kinds.pop().kind not in "biufc":
        return None
    return np.concatenate(values).reshape(len(values), *shapes.pop())


def _alike_numbers(values: list[Any]) -> NDArray[Any] | None:
    """Python's numbers of one type as an array; None: they are something else."""
    if len(kinds := set(map(type, values))) > 1 or not kinds <= {int, float, bool}:
        return None
    column = np.array(values)
    return column if column.dtype.kind in "biuf" else None


def columns_of(columns: Mapping[Any, Any], count: int, origin: str) -> Columns:
    """The columns as arrays. UserError: they are no numbers, or don't have one row a sample."""
    return {
        str(name): _column(str(name), column, count, origin) for name, column in columns.items()
    }


def _column(name: str, values: Any, count: int, origin: str) -> NDArray[Any]:
    array = _array(values, name, origin)
    if array.dtype.kind == "O":
        _check_shapes(name, [_shape(row) for row in values], origin)
    if array.dtype.kind not in "biufc":
        raise UserError(
            f'{origin} gives "{name}" as {array.dtype}, not as numbers',
            "turn it into integers or floats in the data (decode= of samecurve.Shards), or in the"
            " task's collate(self, samples)",
            "task",
        )
    if array.ndim == 0 or len(array) != count:
        raise _wrong_length(name, array.shape, count, origin)
    return array


def _stack(name: str, values: Sequence[Any], origin: str) -> NDArray[Any]:
    parts = [_array(value, name, origin) for value in values]
    _check_shapes(name, [part.shape for part in parts], origin)
    return np.stack(parts)


def _array(value: Any, name: str, origin: str) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError:  # lists of unlike length
        _check_shapes(name, [_shape(row) for row in value], origin)
        raise


def _shape(row: Any) -> tuple[int, ...]:
    if hasattr(row, "shape"):
        return tuple(row.shape)
    return (len(row),) if isinstance(row, list | tuple) else ()


def _check_shapes(name: str, shapes: Sequence[tuple[int, ...]], origin: str) -> None:
    unlike = sorted(set(shapes))
    if len(unlike) > 1:
        raise UserError(
            f'{origin} gives "{name}" of shapes {unlike[0]} and {unlike[1]}',
            "pad them to one shape in the data set; or give the task a method collate(self,"
            " samples) -> {name: array}, which pads each microbatch to its longest. What is padded"
            " gets weight 0 in the loss (labels of -100)",
            "task",
        )


def _check_form(raw: Any, count: int, origin: str) -> None:
    """UserError: it is neither a list of so many items nor a mapping with something in it."""
    if isinstance(raw, list):
        is_right, what = len(raw) == count, f"{len(raw)} items"
    else:
        is_right, what = isinstance(raw, Mapping) and bool(raw), type(raw).__name__
    if not is_right:
        raise UserError(f"{origin} gives {what} for {count} ids", f"it must be {FORM}", "task")


def _wrong_length(name: str, shape: tuple[int, ...], count: int, origin: str) -> UserError:
    return UserError(
        f'{origin} gives "{name}" of shape {shape} for {count} ids',
        "each array has one row an id, in the order of the ids",
        "task",
    )


def _named(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple | list):
        return {str(index): value for index, value in enumerate(item)}
    return {"0": item}
