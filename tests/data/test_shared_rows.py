"""Rows in shared memory are the rows that were written, for as long as somebody looks at them."""

import gc
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.data.shared_rows import SharedReader, SharedWriter, open_shared


def pair() -> tuple[SharedWriter, SharedReader]:
    shared = open_shared()
    return SharedWriter(shared), SharedReader(os.dup(shared))


def rows(seed: int, count: int = 3) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    return {
        "pixels": random.integers(0, 255, (count, 5, 7, 3)).astype(np.uint8)[:, :, ::-1],
        "label": np.arange(count),
        "half": random.normal(size=(count, 1)).astype(np.float16),
        "complex": random.normal(size=(2, count)).T * 1j,  # not contiguous
        "flag": np.ones(count, np.bool_),
        "none": np.zeros((count, 0)),
    }


def passed(writer: SharedWriter, reader: SharedReader, values: dict[str, Any]) -> dict[str, Any]:
    head = writer.write(values)
    assert head is not None
    return reader.read(head)


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and first[name].tobytes() == second[name].tobytes()
        for name in first
    )


def test_rows_stay_while_any_view_of_them_is_held() -> None:
    writer, reader = pair()
    seen = [passed(writer, reader, rows(seed)) for seed in range(20)]
    assert all(equal(each, rows(seed)) for seed, each in enumerate(seen))
    view = seen[4]["pixels"][1:][0].reshape(-1)  # all that is left of the fifth
    del seen
    gc.collect()
    for seed in range(100, 160):
        assert equal(passed(writer, reader, rows(seed)), rows(seed))
    assert view.tobytes() == rows(4)["pixels"][1].tobytes()


def test_memory_is_used_again_and_what_does_not_fit_is_left_to_the_pipe() -> None:
    writer, reader = pair()
    first = rows(0)
    heads = [writer.write(first)]
    for seed in range(50):
        assert heads[-1] is not None
        reader.read(heads[-1])  # and let go
        heads.append(writer.write(rows(seed)))
    assert {head["block"] for head in heads if head} == {heads[0]["block"] if heads[0] else None}
    large = writer.write(rows(1, count=3000))  # the small block is held; a new one is made
    assert large is not None
    assert large["block"] != heads[0]["block"] if heads[0] else False
    held = []
    while (head := writer.write(first)) is not None:
        held.append(reader.read(head))
    assert all(equal(each, first) for each in held)
    held.pop()
    assert writer.write(first) is not None
