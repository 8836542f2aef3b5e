"""Devices divide a step's microbatches: each exactly once, in order, the last round real wherever
there is work.
"""

from itertools import product

import pytest

from samecurve.core.determinism.microbatches import (
    Assignment,
    TreeSum,
    accumulation_steps,
    microbatches_of,
    split_batch,
    subtrees,
)
from samecurve.core.planning.batch import BatchSplit
from samecurve.data import joined


def assign(
    samples: int,
    micro: int,
    device: int,
    num_devices: int,
    times: tuple[float, ...] = (),
    *,
    interleaved: int = 1,
) -> Assignment:
    split = BatchSplit(
        global_batch_size=samples,
        micro_batch_size=micro,
        num_devices=num_devices,
        microbatch_seconds=times,
        interleaved=interleaved,
    )
    return split.assignment(samples, device)


def spans_of(assignments: list[Assignment]) -> list[tuple[int, int]]:
    return [span for each in assignments for span in each.spans]


@pytest.mark.parametrize("samples", [1, 2, 7, 10, 64])
@pytest.mark.parametrize("micro", [1, 3, 4, 100])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_microbatch_is_assigned_once(samples: int, micro: int, world: int) -> None:
    assignments = [assign(samples, micro, device, world) for device in range(world)]
    assert spans_of(assignments) == split_batch(samples, micro)
    rounds = -(-len(split_batch(samples, micro)) // world)
    assert all(len(assignment.rounds) == rounds for assignment in assignments)
    assert all(each.rounds[-1] is not None for each in assignments if each.spans)
    counts = [len(assignment.spans) for assignment in assignments]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("world", "interleaved"), [(2, 2), (3, 3), (4, 2), (6, 3), (8, 8)])
def test_interleaved_devices_take_neighbours_in_each_round(world: int, interleaved: int) -> None:
    """Those of a group; the groups' microbatches are neighbours too. Only a group's first rounds
    are short.
    """
    for samples in range(1, 30):
        of_groups = []
        for first in range(0, world, interleaved):
            devices = range(first, first + interleaved)
            assignments = [assign(samples, 1, d, world, interleaved=interleaved) for d in devices]
            rounds = zip(*(each.rounds for each in assignments), strict=True)
            busy = [[span for span in one_round if span] for one_round in rounds]
            of_groups += [span for one_round in busy for span in one_round]
            full = [len(one_round) == interleaved for one_round in busy]
            assert full == sorted(full)
            assert all(joined(each.spans) == each.spans for each in assignments)
        assert of_groups == split_batch(samples, 1)
        assert len(busy) == accumulation_steps(samples, world)
        split = BatchSplit(
            global_batch_size=samples,
            micro_batch_size=1,
            num_devices=world,
            interleaved=interleaved,
        )
        by_round = split.numbers_by_round(samples, world // interleaved - 1)
        assert [[n for n in one_round if n is not None] for one_round in by_round] == [
            [begin for begin, _ in one_round] for one_round in busy
        ]


def test_microbatches_are_positions() -> None:
    assert split_batch(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert assign(10, 4, 1, 2).rounds == ((4, 8), (8, 10))
    assert assign(10, 4, 0, 2).rounds == (None, (0, 4))
    assert joined(assign(10, 4, 1, 2).spans) == [(4, 10)]
    assert assign(10, 4, 0, 2, interleaved=2).rounds == (None, (4, 8))
    assert assign(10, 4, 1, 2, interleaved=2).rounds == ((0, 4), (8, 10))


@pytest.mark.parametrize(
    "times", [(1.0, 3.0), (3.0, 1.0, 1.1), (0.02, 0.007, 0.5, 0.02), (1.0, 1.0, 1.0), (1e-6, 1.0)]
)
def test_microbatches_by_speed_are_done_as_soon_as_can_be(times: tuple[float, ...]) -> None:
    """Against every way there is to assign them; a device with none has none in any round, and the
    last round is real elsewhere.
    """
    world = len(times)
    for count in range(1, 12):
        shares = [microbatches_of(count, device, world, times) for device in range(world)]
        assert [number for numbers in shares for number in numbers] == list(range(count))
        best = min(
            max(n * t for n, t in zip(ways, times, strict=True))
            for ways in product(range(count + 1), repeat=world)
            if sum(ways) == count
        )
        assert max(
            len(numbers) * t for numbers, t in zip(shares, times, strict=True)
        ) == pytest.approx(best, rel=1e-12)
        assignments = [assign(count * 2 - 1, 2, device, world, times) for device in range(world)]
        assert spans_of(assignments) == split_batch(count * 2 - 1, 2)
        assert (
            {len(assignment.rounds) for assignment in assignments}
            == {accumulation_steps(count, world, times)}
            == {max(map(len, shares))}
        )
        assert all(each.rounds[-1] is not None for each in assignments if each.spans)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 11])
def test_the_tree_is_the_same_whoever_adds(world: int) -> None:
    """A sum that remembers its own form: every device adds what it can, and what all have makes the
    tree that one device makes, level by level.
    """

    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    for count in range(1, 40):
        row = [str(number) for number in range(count)]
        while len(row) > 1:
            row = [
                add(*row[at : at + 2]) if at + 1 < len(row) else row[at]
                for at in range(0, len(row), 2)
            ]
        total = TreeSum(count, add)
        for device in range(world):
            own = TreeSum(count, add)
            for number in microbatches_of(count, device, world):
                own.give((0, number), str(number))
            assert [node for node, _ in own.held] == subtrees(
                microbatches_of(count, device, world), count
            )
            for node, value in own.held:
                total.give(node, value)
        assert total.total() == row[0]
