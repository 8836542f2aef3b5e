"""Samples in buckets: every epoch has each sample once, every step one bucket, on any devices."""

import numpy as np
import pytest

from samecurve.core.bucket_order import BucketOrder
from samecurve.core.determinism.data_order import Anchor
from samecurve.core.planning.fixed import Fixed, make_order
from samecurve.errors import UserError

SIZES = (7, 1, 12, 30)


def order(batch: int = 4, seed: int = 5, sizes: tuple[int, ...] = SIZES) -> BucketOrder:
    return BucketOrder(sum(sizes), batch, seed, bucket_sizes=sizes)


@pytest.mark.parametrize("batch", [1, 4, 7, 100])
def test_an_epoch_has_each_sample_once_and_a_step_one_bucket(batch: int) -> None:
    these = order(batch)
    per_epoch = these.steps_per_epoch
    assert per_epoch == sum(-(-size // batch) for size in SIZES)
    buckets = np.repeat(np.arange(len(SIZES)), SIZES)
    epochs = []
    for epoch in range(3):
        steps = these.ids(range(epoch * per_epoch, (epoch + 1) * per_epoch))
        epochs.append(steps)
        assert sorted(np.concatenate(steps).tolist()) == list(range(sum(SIZES)))
        consumed = 0
        for index, ids in enumerate(steps):
            assert len(set(buckets[ids])) == 1
            position = these.position(epoch * per_epoch + index)
            assert (position.epoch, position.first, position.count) == (epoch, consumed, len(ids))
            consumed += len(ids)
    if batch < 100:  # each epoch has an order of its own
        assert [ids.tolist() for ids in epochs[0]] != [ids.tolist() for ids in epochs[1]]


def test_a_step_can_be_entered_at_once_and_follows_the_seed() -> None:
    whole = order().ids(range(40))
    for step in (0, 17, 39):
        np.testing.assert_array_equal(order().ids(range(step, step + 1))[0], whole[step])
    other = order(seed=6).ids(range(40))
    assert any(not np.array_equal(*pair) for pair in zip(whole, other, strict=True))


def test_buckets_of_one_size_are_not_shuffled_alike() -> None:
    sizes = (16, 16)
    steps = order(batch=16, sizes=sizes).ids(range(2))
    first, second = sorted(steps, key=min)
    assert (second - 16).tolist() != first.tolist()


def test_lengths_in_epochs() -> None:
    these = order()
    assert these.steps_to(2) == 2 * these.steps_per_epoch
    assert these.steps_to(0.5) == -(-these.steps_per_epoch // 2)
    assert [these.epoch_of(step) for step in (0, these.steps_per_epoch)] == [0, 1]


def test_another_batch_begins_with_an_epoch() -> None:
    def fixed(consumed: int) -> Fixed:
        anchor = Anchor(step=9, epoch=3, consumed=consumed)
        return Fixed(
            global_batch_size=8,
            micro_batch_size=2,
            seed=0,
            samples=50,
            fingerprint="",
            threads=1,
            anchor=anchor,
        )

    later = make_order(50, {"train": SIZES}, 8, fixed(0))
    assert later.position(9).epoch == 3
    assert later.epoch_of(9 + later.steps_per_epoch) == 4
    with pytest.raises(UserError, match="within an epoch of buckets: 12 of its 50"):
        make_order(50, {"train": SIZES}, 8, fixed(12))
