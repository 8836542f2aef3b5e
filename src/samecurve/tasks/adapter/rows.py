"""A user's data as a source: rows by ids, as numpy arrays, whatever form the data has.

The same id must give the same row whenever it is read in an epoch, or else a resumed run would see
other data.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.core.planning.fixed import ROWS_BESIDE
from samecurve.errors import UserError
from samecurve.tasks.adapter.returned import (
    Columns,
    count_samples,
    is_from,
    is_torch,
    parameters_of,
)
from samecurve.tasks.user_class.user_errors import calling, end_copy, raise_explained

if TYPE_CHECKING:  # few tasks have a collate()
    from samecurve.tasks.adapter.columns import Collation

_KNOWN_BY = 16  # rows that stand for data without a fingerprint of its own
_SHARDS = "samecurve.data.shards.source"  # where Shards is; few runs import it


class Rows:
    """The rows of a task's data.

    data: a source, or a torch Dataset, whose items are stacked; its __getitem__ is given the epoch
        if it has a parameter `epoch`
    what: the call that gave the data, for errors
    path: the user's file, which may raise; None: the code is ours
    collation: makes arrays of samples of unlike length, in place of stacking
    """

    def __init__(
        self, data: Any, what: str, path: Path | None, collation: "Collation | None" = None
    ) -> None:
        self._what, self._path, self._collation = what, path, collation
        self._origin = f"the data of {what}"
        self._count = count_samples(data, what)
        own = getattr(data, "fingerprint", None)
        self._own_fingerprint: Callable[[], Any] | None = None
        if callable(own) and not is_from(data, _SHARDS):
            self._own_fingerprint = own
        self._data, self._subset = _outside_of_subsets(data)
        self._gives_items = is_torch(self._data, "Dataset")
        self._takes_lists = is_from(self._data, "datasets.arrow_dataset")  # of Hugging Face
        self._by_epoch = _asks_for_epoch(self._data)
        self._drawn: list[str] = []  # the generator that each _digest() drew from; '': from none
        self._check_wrapped()

    @property
    def by_epoch(self) -> bool:
        """Whether an id may give another row in another epoch."""
        return self._by_epoch or (self._collation is not None and self._collation.by_epoch)

    @property
    def by_microbatch(self) -> bool:
        """Whether the shape of a row follows from the rows that are read with it."""
        return self._collation is not None

    @cached_property
    def lengths(self) -> NDArray[np.int64] | None:
        """The data's row_lengths, where rows are padded by microbatch; else None.

        UserError: row_lengths is not one whole number for each row.
        """
        lengths = getattr(self._data, "row_lengths", None)
        if lengths is None or self._collation is None:
            return None
        array = np.asarray(lengths)
        if self._subset is not None:
            array = array[self._subset]
        if array.shape != (self._count,) or array.dtype.kind not in "iu":
            raise self._wrong(
                f"has row_lengths of shape {array.shape} and type {array.dtype} for {self._count}"
                " rows",
                "one whole number a row: how long it is (tokens), an attribute of the data",
            )
        return array.astype(np.int64)

    @cached_property
    def bucket_sizes(self) -> tuple[int, ...]:
        """The data's bucket_sizes: samples of each bucket, whose ids are neighbours; () for none.

        UserError: they are not whole numbers that add up to the data's length.
        """
        sizes = tuple(getattr(self._data, "bucket_sizes", ()))
        whole = all(isinstance(size, int | np.integer) and size > 0 for size in sizes)
        if not sizes or (whole and sum(sizes) == self._count and self._subset is None):
            return tuple(map(int, sizes))
        raise self._wrong(
            f"has bucket_sizes {_some(sizes)}, for {self._count} samples",
            "one whole number from 1 on for each bucket, which add up to the number of samples; ids"
            " count through the first bucket, then the second (a torch Subset takes them apart)",
        )

    @property
    def alike(self) -> range:
        """Ids of rows that can be read together: all, or those of the largest bucket."""
        if not self.bucket_sizes:
            return range(self._count)
        largest = int(np.argmax(self.bucket_sizes))
        first = sum(self.bucket_sizes[:largest])
        return range(first, first + self.bucket_sizes[largest])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: Ids) -> Columns:
        return self.read(ids, 0)

    def read(self, ids: Ids, epoch: int) -> Columns:
        """The rows of these ids in an epoch (0 for held-out data).

        Every step goes through here: arrays of numbers are passed on as they are.
        """
        process = getpid()
        try:
            raw = self._read_raw(ids, epoch)
        except BaseException as error:
            raise_explained(error, self._origin, self._path, UserError, process)
        if self._path is not None and getpid() != process:
            end_copy(self._origin)
        if self._collation is None:
            if _are_columns(raw, len(ids)):
                return dict(raw)
            return self._stacked(raw, len(ids), self._origin)
        samples = self._collation.samples_of(raw, len(ids), self._origin)
        return self._collated(samples, ids, epoch)

    @cached_property
    def _stacked(self) -> Callable[[Any, int, str], Columns]:
        """Makes columns of what is not yet such; arrays of numbers by name never come to it."""
        from samecurve.tasks.adapter.columns import stacked

        return stacked

    def _collated(self, samples: list[Any], ids: Ids, epoch: int) -> Columns:
        assert self._collation is not None
        with calling(self._collation.name, self._path):
            return self._collation(samples, ids, epoch)

    def fingerprint(self) -> str:
        """The data's own fingerprint(), or else a hash over its length and up to 16 of its rows.

        The hash does not see a change of other rows.
        """
        if self._own_fingerprint:
            return str(self._own_fingerprint())
        by_rows = self._by_rows()
        if is_from(self._data, _SHARDS):  # what they hold; the rows tell what is made of it
            return f"{self._data.fingerprint()}, {by_rows}"
        return by_rows

    def with_rows(self, fingerprint: str) -> str:
        """A fingerprint of this data, with the hash over its rows beside it."""
        by_rows = self._by_rows()
        return fingerprint if by_rows in fingerprint else f"{fingerprint}{ROWS_BESIDE}{by_rows}"

    def _by_rows(self) -> str:
        return f"{_KNOWN_BY} rows: {self._digest(0)}"

    def check(self) -> None:
        """UserError: a row changes with the reading, with collate()'s order, or with the process.

        A fingerprint() says which data this is, and not that its rows repeat.
        """
        if self._collation:
            self._check_collation(self._collation)
        for epoch in (0, 1) if self.by_epoch else (0,):
            self._check_repeats(epoch)
        if self._drawn[0] and not self._drawn[-1] and not self._draws_again():
            raise self._wrong(
                f"draws numbers of {self._drawn[0]} when a sample is first read, and keeps them:"
                " each process, and each start, keeps others",
                "draw them from a generator made of the sample's id: samecurve.sample_rng(id)",
            )
        ids = self._spread()
        together = self[ids]
        for place, row_id in enumerate(ids):
            alone = self[ids[place : place + 1]]
            for name in sorted(together.keys() & alone.keys()):
                self._check_alone(
                    f'"{name}" of row {row_id}', together[name][place], alone[name][0]
                )

    def _check_collation(self, collation: "Collation") -> None:
        """UserError: collate() gives other arrays for the same samples, or rows in another order.

        A collate() that sorts samples by their length does the latter.
        """
        ids = self._spread()
        with calling(self._origin, self._path):
            raw = self._read_raw(ids, 0)
        name, samples = collation.name, collation.samples_of(raw, len(ids), self._origin)
        first = self._collated(deepcopy(samples), ids, 0)  # it may take them apart
        again = self._collated(deepcopy(samples), ids, 0)
        turned = self._collated(samples[::-1], ids[::-1], 0)
        if not _equal(first, again):
            raise UserError(
                f"{name} gives other arrays for the same samples",
                "draw its numbers from generators made of the samples: collate(self, samples, ids,"
                " epoch), samecurve.sample_rng(ids[row], epoch) for each row",
                "task",
            )
        if not _equal(first, {name: column[::-1] for name, column in turned.items()}):
            raise UserError(
                f"{name} gives other rows when the same samples come in another order",
                "row i of each array belongs to samples[i], unsorted (pack_padded_sequence takes"
                " enforce_sorted=False), and depends on the others by its padding alone",
                "task",
            )

    def _check_repeats(self, epoch: int) -> None:
        if self._digest(epoch) != self._digest(epoch):
            raise self._wrong(
                "gives other values when a sample is read again",
                "draw them from a generator made of the sample's id: samecurve.sample_rng(id), so"
                " that a resumed or repeated run sees the same (with __getitem__(self, ids, epoch)"
                " and sample_rng(id, epoch) others in each epoch); or draw in loss(), where"
                " samecurve.rng(batch) and torch.rand(len(x)) follow the sample. A fingerprint()"
                " does not help: other values are another curve",
            )

    def _draws_again(self) -> bool:
        """Whether a reading still moves a generator, from another state than readings leave.

        Data that seed a generator at each reading do so; data that keep what they drew do not.
        """
        from samecurve.data.generators import moved

        with moved(self._data):
            self._digest(0)
        return bool(self._drawn[-1])

    def _check_alone(
        self, what: str, row_among_others: NDArray[Any], row_alone: NDArray[Any]
    ) -> None:
        """UserError: the row has other bits when read alone; another length is mere padding."""
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

    def _check_wrapped(self) -> None:
        """UserError: a data set inside of this one asks for the epoch, and would not get it."""
        inner = self._data.datasets if is_torch(self._data, "ConcatDataset") else ()
        asking = [one for one in inner if _asks_for_epoch(one)]
        if asking:
            raise self._wrong(
                f"is a ConcatDataset, which does not tell {type(asking[0]).__name__} the epoch",
                "a Dataset of yours in its place, whose __getitem__(self, index, epoch) passes it"
                " on",
            )

    def _spread(self) -> Ids:
        """At most 16 ids, spread over the data; of buckets, over the largest, of one shape."""
        ids = self.alike
        places = np.linspace(0, len(ids) - 1, min(len(ids), _KNOWN_BY))
        return ids.start + np.unique(places.astype(np.int64))

    def _digest(self, epoch: int) -> str:
        from samecurve.data.generators import states_of  # runs of our own tasks need none

        digest, before = hashlib.sha256(str(self._count).encode()), states_of(self._data)
        for name, column in sorted(self.read(self._spread(), epoch).items()):
            digest.update(f"/{name}/{column.dtype.str}/{column.shape}/".encode())
            digest.update(np.ascontiguousarray(column).tobytes())
        after = states_of(self._data)
        self._drawn.append(next((name for name in after if after[name] != before.get(name)), ""))
        return digest.hexdigest()

    def _read_raw(self, ids: Ids, epoch: int) -> Any:
        """The data's own answer: columns by name, or a list with one item an id."""
        if self._subset is not None:
            ids = self._subset[ids]
        by_name = {"epoch": epoch} if self._by_epoch else {}
        if self._gives_items:
            return self._read_items(ids.tolist(), by_name)
        if self._takes_lists:
            return self._data[ids.tolist()]
        return self._data.__getitem__(ids, **by_name)

    def _read_items(self, indices: list[int], by_name: Mapping[str, int]) -> list[Any]:
        """The items of a torch Dataset."""
        at_once = getattr(self._data, "__getitems__", None)
        if at_once and (not by_name or "epoch" in parameters_of(at_once)):
            return list(at_once(indices, **by_name))
        return [self._item(index, by_name) for index in indices]

    def _item(self, index: int, by_name: Mapping[str, int]) -> Any:
        try:
            return self._data.__getitem__(index, **by_name)
        except Exception as error:
            error.add_note(f"sample {index}")
            raise

    def _wrong(self, cause: str, remedy: str) -> UserError:
        return UserError(f"{self._origin} {cause}", remedy, "task")


def _are_columns(raw: Any, count: int) -> bool:
    """Whether these are arrays of numbers by name, one row a sample: what stacked() makes."""
    if type(raw) is not dict or not raw:
        return False
    for name, column in raw.items():
        if type(name) is not str or type(column) is not np.ndarray or not column.ndim:
            return False
        if column.dtype.kind not in "biufc" or len(column) != count:
            return False
    return True


def _some(sizes: Sequence[object]) -> str:
    """The first of some sizes, for an error."""
    return ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")


def _equal(first: Columns, second: Columns) -> bool:
    """Whether two sets of columns are equal to the bit."""
    return first.keys() == second.keys() and all(
        column.shape == second[name].shape and column.tobytes() == second[name].tobytes()
        for name, column in first.items()
    )


def _outside_of_subsets(data: Any) -> tuple[Any, Ids | None]:
    """The data inside of torch Subsets that asks for the epoch, and the ids chosen of it.

    A Subset does not pass the epoch on. None: all ids, or the data does not ask for the epoch.
    """
    inner, chosen = data, None
    while is_torch(inner, "Subset"):
        indices = np.asarray(inner.indices, np.int64)
        chosen = indices if chosen is None else indices[chosen]
        inner = inner.dataset
    if _asks_for_epoch(inner):
        return inner, chosen
    return data, None


def _asks_for_epoch(data: Any) -> bool:
    return "epoch" in parameters_of(data.__getitem__)
