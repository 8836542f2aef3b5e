"""A user's data as a source: rows by ids, as numpy arrays, whatever it gives.

The same id must give the same row whenever it is read, or else a resumed run would see other data.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.errors import UserError
from samecurve.tasks.user_file import calling

_FORM = (
    "a torch Dataset (not its DataLoader), or an object with __len__ and __getitem__(ids: int64"
    " array) -> {name: array with one row an id}"
)
_KNOWN_BY = 16  # rows that stand for data without a fingerprint of its own


class Rows:
    """data: a source, or a torch Dataset, whose items are stacked.

    what: the call that gave it, for errors
    path: the user's file, which may raise; None: the code is ours
    """

    def __init__(self, data: Any, what: str, path: Path | None) -> None:
        self._data, self._what, self._path = data, what, path
        self._count = _length(data, what)
        self._read_rows: Callable[[Ids], Any] = (
            self._stacked if _is_torch(data, "Dataset") else data.__getitem__
        )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: Ids) -> dict[str, NDArray[Any]]:
        with calling(f"the data of {self._what}", self._path):
            rows = self._read_rows(ids)
        if not isinstance(rows, Mapping) or not rows:
            raise self._wrong(
                f"gives {type(rows).__name__} for {len(ids)} ids", f"it must be {_FORM}"
            )
        return {
            str(name): self._column(str(name), column, len(ids)) for name, column in rows.items()
        }

    def fingerprint(self) -> str:
        """The data's own fingerprint() where it has one; else a hash over its length and up to 16
        rows spread over it: a change elsewhere is not seen.
        """
        own = getattr(self._data, "fingerprint", None)
        return str(own()) if callable(own) else f"{_KNOWN_BY} rows: {self._digest()}"

    def check(self) -> None:
        """UserError: a row is not the same when it is read again, or alone (the data has no
        fingerprint of its own to go by).
        """
        if callable(getattr(self._data, "fingerprint", None)):
            return
        if self._digest() != self._digest():
            raise self._wrong(
                "gives other values when a sample is read again",
                "draw them from a generator made of the sample's id: np.random.default_rng((seed,"
                " id)), so that a resumed or repeated run sees the same; or give the data a method"
                " fingerprint() -> str, by which it is known instead",
            )
        ids = self._spread()
        together = self[ids]
        for place, row_id in enumerate(ids):
            alone = self[ids[place : place + 1]]
            for name in sorted(together.keys() & alone.keys()):
                self._check_alone(
                    f'"{name}" of row {row_id}', together[name][place], alone[name][0]
                )

    def _check_alone(
        self, what: str, row_among_others: NDArray[Any], row_alone: NDArray[Any]
    ) -> None:
        """UserError: other bits, and not only padding to the longest of those read together."""
        if row_alone.shape != row_among_others.shape or (
            row_alone.tobytes() == row_among_others.tobytes()
        ):
            return
        difference = np.abs(row_alone.astype(complex) - row_among_others.astype(complex)).max()
        raise self._wrong(
            f"gives {what} otherwise when it is read alone: it differs by {difference:.1e}",
            "a row may depend on its id only, whatever is read with it. A matrix product (x @ w)"
            " rounds by the number of rows: compute rows elementwise, beforehand, or in float64"
            " and then round to float32",
        )

    def _spread(self) -> Ids:
        """Up to 16 ids, spread over the data."""
        count = min(self._count, _KNOWN_BY)
        return np.unique(np.linspace(0, self._count - 1, count).astype(np.int64))

    def _digest(self) -> str:
        digest = hashlib.sha256(str(self._count).encode())
        for name, column in sorted(self[self._spread()].items()):
            digest.update(f"/{name}/{column.dtype.str}/{column.shape}/".encode())
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    def _column(self, name: str, column: Any, count: int) -> NDArray[Any]:
        array = _array(column)
        if array.dtype.kind not in "biufc":
            raise self._wrong(
                f'gives "{name}" as {array.dtype}, not as numbers',
                "turn it into integers or floats in the data, before it is returned",
            )
        if array.ndim == 0 or len(array) != count:
            raise self._wrong(
                f'gives "{name}" of shape {array.shape} for {count} ids',
                "each array has one row an id, in the order of the ids",
            )
        return array

    def _stacked(self, ids: Ids) -> dict[str, Any]:
        """The items of a torch Dataset, name by name."""
        if getattr(self._data, "__getitems__", None):
            raw_items = self._data.__getitems__(ids.tolist())
        else:
            raw_items = [self._item(index) for index in ids.tolist()]
        items = [_named(item) for item in raw_items]
        names = list(items[0])
        if any(list(item) != names for item in items):
            raise self._wrong(
                f"gives items of unlike parts: some have {', '.join(names)}",
                "every item has the same names",
            )
        return {name: self._stack(name, [item[name] for item in items]) for name in names}

    def _item(self, index: int) -> Any:
        try:
            return self._data[index]
        except Exception as error:
            error.add_note(f"sample {index}")
            raise

    def _stack(self, name: str, values: Sequence[Any]) -> NDArray[Any]:
        parts = [_array(value) for value in values]
        shapes = sorted({part.shape for part in parts})
        if len(shapes) > 1:
            raise self._wrong(
                f'gives "{name}" of shapes {shapes[0]} and {shapes[1]}',
                "pad them to one shape in the data set; what is padded gets weight 0 in the loss"
                " (labels of -100)",
            )
        return np.stack(parts)

    def _wrong(self, cause: str, remedy: str) -> UserError:
        return UserError(f"the data of {self._what} {cause}", remedy, "task")


def _is_torch(data: Any, kind: str) -> bool:
    """Whether it is one of torch's data sets, which only exist where torch has been imported."""
    torch: Any = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(data, getattr(torch, kind))


def _array(value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def _named(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple | list):
        return {str(index): value for index, value in enumerate(item)}
    return {"0": item}


def _length(data: Any, what: str) -> int:
    """How many samples there are. UserError: none, or nothing to count."""
    lack = None
    if _is_torch(data, "IterableDataset"):
        lack = "is read in its own order, not by id"
    elif not hasattr(data, "__getitem__"):
        lack = "has no __getitem__"
    elif not hasattr(data, "__len__"):
        lack = "has no length (__len__)"
    if lack:
        raise UserError(
            f"the data of {what}, of type {type(data).__name__}, {lack}",
            f"return {_FORM}: which samples a step takes follows from their number and the seed",
            "task",
        )
    count = len(data)
    if count < 1:
        raise UserError(
            f"the data of {what} has no sample",
            "its length must be at least 1; eval_data() may return None",
            "task",
        )
    return count
