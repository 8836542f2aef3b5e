"""Data as people write it, read by id: what follows the epoch, and what is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from samecurve import sample_rng
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.errors import UserError
from samecurve.tasks import Tasks
from samecurve.tasks.adapter import TaskAdapter
from samecurve.tasks.adapter.columns import Collation, stacked
from samecurve.tasks.adapter.rows import Rows

IDS = np.array([4, 0, 2])


class Noisy:
    """Row i is i, and noise of its id and the epoch."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, ids: Any, epoch: int = 0) -> dict[str, Any]:
        return {"id": ids, "noise": np.stack([sample_rng(i, epoch).normal(size=3) for i in ids])}


class NoisyItems(Dataset[Any]):
    """The same rows, one by one."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int, epoch: int = 0) -> dict[str, Any]:
        return {"id": index, "noise": sample_rng(index, epoch).normal(size=3)}


class NoisyLists(NoisyItems):
    def __getitems__(self, indices: list[int], epoch: int) -> list[Any]:
        return [self[index] | self.__getitem__(index, epoch) for index in indices]


class Stale(NoisyItems):
    """Reads many at once only without the epoch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def rows(data: Any) -> Rows:
    return Rows(data, "My.train_data()", None)


def said(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def test_a_samples_generator_is_a_function_of_id_epoch_and_seed() -> None:
    """Its numbers are fixed here: an augmented run must be resumed with what it began with."""
    drawn = [sample_rng(7, 2).integers(1 << 40), sample_rng(int(IDS[0]) + 3, 2).integers(1 << 40)]
    assert drawn == [FIRST_DRAW, FIRST_DRAW]
    others = [sample_rng(7), sample_rng(8, 2), sample_rng(7, 3), sample_rng(7, 2, seed=1)]
    assert FIRST_DRAW not in [other.integers(1 << 40) for other in others]


FIRST_DRAW = 535702887001


@pytest.mark.parametrize("kind", [Noisy, NoisyItems, NoisyLists, Stale])
def test_data_that_asks_for_the_epoch_is_told(kind: Callable[[], Any]) -> None:
    source = rows(kind())
    assert source.by_epoch
    source.check()
    for epoch in (0, 3):
        read = source.read(IDS, epoch)
        np.testing.assert_array_equal(read["id"], IDS)
        expected = np.stack([sample_rng(i, epoch).normal(size=3) for i in IDS])
        np.testing.assert_array_equal(read["noise"], expected)
    assert source.fingerprint() == rows(Noisy()).fingerprint()


def test_a_part_of_such_data_is_told_too_and_a_wrapper_that_hides_it_is_refused() -> None:
    part = Subset(Subset(NoisyItems(), [4, 3, 2, 1]), [3, 0])  # the samples 1 and 4
    read = rows(part).read(np.array([1, 0]), 3)
    np.testing.assert_array_equal(read["id"], [4, 1])
    np.testing.assert_array_equal(read["noise"][1], sample_rng(1, 3).normal(size=3))
    text = said(lambda: rows(ConcatDataset([NoisyItems(), NoisyItems()])))
    assert "is a ConcatDataset, which does not tell NoisyItems the epoch" in text
    assert not rows(Subset([0.5, 1.5, 2.5], [2, 0])).by_epoch  # type: ignore[arg-type]


def test_rows_that_change_within_a_later_epoch_are_found() -> None:
    class Drawn(Noisy):
        def __getitem__(self, ids: Any, epoch: int = 0) -> dict[str, Any]:
            noise = np.random.default_rng().normal(size=len(ids)) if epoch else np.zeros(len(ids))
            return {**super().__getitem__(ids, epoch), "more": noise}

    text = said(rows(Drawn()).check)
    assert "gives other values when a sample is read again" in text
    assert "samecurve.sample_rng(id)" in text


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def foreign(module: str, name: str, **members: Any) -> Any:
    """An object of a library's class that is not installed here."""
    return type(name, (), {"__module__": module, **members})()


class Splits(dict[str, Any]):
    __module__ = "datasets.dataset_dict"


REFUSED = {
    "loader": (
        DataLoader(NoisyItems()),
        ["of type DataLoader, reads in its own order", "collate(self, samples)", "batch.samples"],
    ),
    "stream": (
        Stream(),
        ["of type Stream, is read in its own order, not by id", "samecurve.Shards("],
    ),
    "streamed": (
        foreign("datasets.iterable_dataset", "IterableDataset", __iter__=lambda _: iter([])),
        ["read in its own order", "streaming=False", 'samecurve.Shards("data/*.parquet")'],
    ),
    "webdataset": (
        foreign("webdataset.compat", "WebDataset", __iter__=lambda _: iter([])),
        ["read in its own order", 'samecurve.Shards("shards/*.tar"'],
    ),
    "splits": (
        Splits(train=[1], test=[2]),
        ["holds several data sets ('train', 'test')", 'data["train"]'],
    ),
    "names": ({"x": np.zeros(3)}, ["is read by names ('x')", "{name: array[ids]"]),
    "pair": ((np.zeros(3), np.zeros(3)), ["by one number at a time", "TensorDataset(x, y)"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_by_id_is_refused_with_what_serves(case: str) -> None:
    data, words = REFUSED[case]
    text = said(lambda: rows(data))
    assert [word for word in words if word not in text] == [], text


def test_a_hugging_face_dataset_is_read_by_lists_of_numbers() -> None:
    """Its columns are lists; a numpy array of ids it would take apart itself."""

    def columns(_self: Any, indices: list[int]) -> dict[str, list[Any]]:
        assert all(type(index) is int for index in indices)
        return {"x": [[index, index + 1] for index in indices], "y": indices}

    table = foreign("datasets.arrow_dataset", "Dataset", __len__=lambda _: 5, __getitem__=columns)
    read = rows(table)[IDS]
    np.testing.assert_array_equal(read["x"], np.stack([IDS, IDS + 1], 1))
    np.testing.assert_array_equal(read["y"], IDS)


def test_a_source_may_give_one_item_an_id() -> None:
    class Items(Noisy):
        def __getitem__(self, ids: Any) -> Any:  # type: ignore[override]
            return [(torch.tensor([i, i]), int(i)) for i in ids][: len(ids) - (self.short)]

        short = 0

    read = rows(Items())[IDS]
    np.testing.assert_array_equal(read["0"], np.stack([IDS, IDS], 1))
    np.testing.assert_array_equal(read["1"], IDS)
    Items.short = 1
    assert "gives 2 items for 3 ids" in said(lambda: rows(Items())[IDS])


class Lines(Dataset[Any]):
    """Item i is i + 1 numbers."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.arange(index + 1.0), "y": index}


class Columns(Lines):
    """The same, many at once."""

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        return {"x": [np.arange(i + 1.0) for i in ids], "y": torch.from_numpy(ids)}


def padded(samples: list[Any]) -> dict[str, Any]:
    """It takes the samples apart."""
    rows = [sample.pop("x") for sample in samples]
    longest = max(map(len, rows))
    x = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    return {"x": torch.from_numpy(x), "y": [sample["y"] for sample in samples]}


def collated(collate: Callable[..., Any], data: Any = None) -> Rows:
    collation = Collation(collate, "My.collate()")
    return Rows(data or Lines(), "My.train_data()", None, collation)


@pytest.mark.parametrize("kind", [Lines, lambda: as_source(Columns())])
def test_rows_are_padded_to_the_longest_of_those_that_are_read_together(
    kind: Callable[[], Any],
) -> None:
    source = collated(padded, kind())
    source.check()
    assert source.by_microbatch
    assert not source.by_epoch
    for ids, width in ((IDS, 5), (np.array([1, 0]), 2)):
        read = source[ids]
        expected = np.tile(np.arange(float(width)), (len(ids), 1))
        np.testing.assert_array_equal(read["x"], expected * (expected <= ids[:, None]))
        np.testing.assert_array_equal(read["y"], ids)
    assert source.fingerprint() == collated(padded).fingerprint()


def as_source(data: Any) -> Any:
    """With its two methods, but no torch Dataset."""
    return foreign(
        "mine", "Source", __len__=lambda _: len(data), __getitem__=lambda _, ids: data[ids]
    )


def test_a_collate_may_ask_for_ids_and_epoch() -> None:
    def noisy(samples: list[Any], epoch: int, ids: Any) -> dict[str, Any]:
        noise = np.stack([sample_rng(i, epoch).normal(size=2) for i in ids])
        return {**padded(samples), "noise": noise}

    source = collated(noisy)
    source.check()
    assert source.by_epoch
    np.testing.assert_array_equal(source.read(IDS, 4)["noise"][1], sample_rng(0, 4).normal(size=2))


def by_length(samples: list[Any]) -> dict[str, Any]:
    return padded(sorted(samples, key=lambda sample: len(sample["x"])))


def drawn(samples: list[Any]) -> dict[str, Any]:
    return {**padded(samples), "mask": np.random.default_rng().random(len(samples))}


def centred(samples: list[Any]) -> dict[str, Any]:
    y = np.array([sample["y"] for sample in samples], float)
    return {"y": y - y[0]}


WRONG: dict[str, tuple[Callable[[], object], list[str]]] = {
    "no names": (
        lambda: collated(lambda samples: [samples])[IDS],
        ["My.collate() returns list, not arrays by name", '{"tokens": tokens'],
    ),
    "packed": (
        lambda: collated(lambda s: {"x": np.concatenate([one["x"] for one in s])})[IDS],
        ['My.collate() gives "x" of shape (9,) for 3 ids', "one row an id"],
    ),
    "not padded": (
        lambda: collated(lambda s: {"x": [one["x"].tolist() for one in s]})[IDS],
        ['My.collate() gives "x" of shapes (1,) and (3,)', "pads each microbatch to its longest"],
    ),
    "sorted": (
        lambda: collated(by_length).check(),
        ["My.collate() gives other rows when the same samples come in another order", "unsorted"],
    ),
    "drawn": (
        lambda: collated(drawn).check(),
        ["My.collate() gives other arrays for the same samples", "collate(self, samples, ids"],
    ),
    "coupled": (
        lambda: collated(centred).check(),
        ["My.collate() gives other rows", "depends on the others by its padding alone"],
    ),
    "ragged items": (
        lambda: rows(Lines())[IDS],
        ['the data of My.train_data() gives "x" of shapes (1,) and (3,)', "collate(self, samples)"],
    ),
    "ragged arrays": (
        lambda: rows(as_source(Columns()))[IDS],
        ['the data of My.train_data() gives "x" of shapes (1,) and (3,)', "collate(self, samples)"],
    ),
    "ragged lists": (
        lambda: rows(foreign("m", "L", __len__=lambda _: 5, __getitem__=lists))[IDS],
        ['the data of My.train_data() gives "x" of shapes (1,) and (3,)', "collate(self, samples)"],
    ),
}


class Padding:
    """A task of which no model is needed."""

    def train_data(self) -> Any:
        return Lines()

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        return padded(samples)


def test_a_task_collates_with_torch_and_is_refused_with_jax() -> None:
    def opened(**values: str) -> TaskAdapter:
        config = load_document(
            Document({"task": "language", "batch": {"samples": 4}, **values}), Tasks()
        )
        return TaskAdapter(Padding, config.config, "")

    np.testing.assert_array_equal(opened().train_data()[IDS]["x"], collated(padded)[IDS]["x"])
    text = said(lambda: opened(engine="jax"))
    assert "Padding.collate(): engine jax compiles its step for one shape of row" in text
    assert "pad the rows to one length in the data" in text


def lists(_self: Any, ids: Any) -> dict[str, Any]:
    return {"x": [list(range(i + 1)) for i in ids]}


@pytest.mark.parametrize("case", WRONG)
def test_what_collate_may_not_return_is_told(case: str) -> None:
    call, words = WRONG[case]
    text = said(call)
    assert [word for word in words if word not in text] == [], text


def test_items_of_a_dataset_are_stacked_the_same_by_the_short_way_and_by_the_long() -> None:
    """Dicts of arrays and numbers that are alike go the short way; a tensor among them does not."""
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    alike = [
        {"x": pixels[n], "y": n, "z": n / 2, "flag": n > 0, "scalar": np.float32(n)}
        for n in range(2)
    ]
    short = [{k: v for k, v in item.items() if k != "scalar"} for item in alike]
    long = stacked([{**item, "t": torch.ones(2)} for item in alike], 2, "data")
    for name, column in stacked(short, 2, "data").items():
        assert column.dtype == long[name].dtype
        np.testing.assert_array_equal(column, long[name])
    assert stacked(short, 2, "data")["x"].base is not pixels
    mixed = [{"x": pixels[0].astype(np.float32)}, {"x": pixels[0]}]
    assert stacked(mixed, 2, "data")["x"].dtype == np.float32
    with pytest.raises(UserError, match=r"unlike parts"):
        stacked([{"x": 1, "y": 2}, {"x": 1, "z": 2}], 2, "data")
    with pytest.raises(UserError, match=r"shapes \(1,\) and \(2,\)"):
        stacked([{"x": np.ones(1)}, {"x": np.ones(2)}], 2, "data")
    with pytest.raises(UserError, match="not as numbers"):
        stacked([{"x": 1 << 70}, {"x": 2}], 2, "data")
