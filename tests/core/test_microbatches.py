"""Devices divide a step's slots: each exactly once, in order, the last round real wherever there is
work.
"""

from itertools import product

import pytest

from samecurve.core.determinism.microbatches import (
    TreeSum,
    accumulation_steps,
    assign,
    microbatches_of,
    split_batch,
    subtrees,
)


@pytest.mark.parametrize("samples", [1, 2, 7, 10, 64])
@pytest.mark.parametrize("micro", [1, 3, 4, 100])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_slot_is_dealt_once(samples: int, micro: int, world: int) -> None:
    hands = [assign(samples, micro, device, world) for device in range(world)]
    assert [span for hand in hands for span in hand.spans] == split_batch(samples, micro)
    rounds = -(-len(split_batch(samples, micro)) // world)
    assert all(len(hand.rounds) == rounds for hand in hands)
    assert all(hand.rounds[-1] is not None for hand in hands if hand.spans)
    assert max(len(hand.spans) for hand in hands) - min(len(hand.spans) for hand in hands) <= 1


def test_slots_are_positions() -> None:
    assert split_batch(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert assign(10, 4, 1, 2).rounds == ((4, 8), (8, 10))
    assert assign(10, 4, 0, 2).rounds == (None, (0, 4))


@pytest.mark.parametrize(
    "times", [(1.0, 3.0), (3.0, 1.0, 1.1), (0.02, 0.007, 0.5, 0.02), (1.0, 1.0, 1.0), (1e-6, 1.0)]
)
def test_slots_by_speed_are_done_as_soon_as_can_be(times: tuple[float, ...]) -> None:
    """Against every way there is to deal them; a device with no slot has none in any round, and the
    last round is real elsewhere.
    """
    world = len(times)
    for count in range(1, 12):
        shares = [microbatches_of(count, device, world, times) for device in range(world)]
        assert [slot for mine in shares for slot in mine] == list(range(count))
        best = min(
            max(n * t for n, t in zip(ways, times, strict=True))
            for ways in product(range(count + 1), repeat=world)
            if sum(ways) == count
        )
        assert max(len(mine) * t for mine, t in zip(shares, times, strict=True)) == pytest.approx(
            best, rel=1e-12
        )
        hands = [assign(count * 2 - 1, 2, device, world, times) for device in range(world)]
        assert [span for hand in hands for span in hand.spans] == split_batch(count * 2 - 1, 2)
        assert (
            {len(hand.rounds) for hand in hands}
            == {accumulation_steps(count, world, times)}
            == {max(map(len, shares))}
        )
        assert all(hand.rounds[-1] is not None for hand in hands if hand.spans)


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
