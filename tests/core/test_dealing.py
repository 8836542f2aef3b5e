"""Devices divide a step's slots: each exactly once, in order, the last round real wherever there is work."""

import pytest

from lockstep.core.dealing import deal, slots


@pytest.mark.parametrize("samples", [1, 2, 7, 10, 64])
@pytest.mark.parametrize("micro", [1, 3, 4, 100])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_slot_is_dealt_once(samples: int, micro: int, world: int) -> None:
    hands = [deal(samples, micro, device, world) for device in range(world)]
    assert [span for hand in hands for span in hand.spans] == slots(samples, micro)
    rounds = -(-len(slots(samples, micro)) // world)
    assert all(len(hand.rounds) == rounds for hand in hands)
    assert all(hand.rounds[-1] is not None for hand in hands if hand.spans)
    assert max(len(hand.spans) for hand in hands) - min(len(hand.spans) for hand in hands) <= 1


def test_slots_are_positions() -> None:
    assert slots(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert deal(10, 4, 1, 2).rounds == ((4, 8), (8, 10))
    assert deal(10, 4, 0, 2).rounds == (None, (0, 4))
