"""Data order is a pure function of (seed, epoch, position): every sample once an epoch, whatever
the step one enters at.
"""

import numpy as np
import pytest

from samecurve.core.determinism.data_order import Anchor, Order, by_length, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1023, 1024, 1025, 5000])
def test_an_epoch_holds_every_sample_once(size: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0)):
        assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


def test_seeds_and_epochs_shuffle_differently() -> None:
    first, second, third = (
        permute(np.arange(1000), 1000, *key) for key in ((0, 0), (0, 1), (1, 0))
    )
    for one, other in ((first, second), (first, third), (first, np.arange(1000))):
        assert (one == other).mean() < 0.02
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.1


def test_the_order_of_released_versions_stays() -> None:
    """A run saved by one version goes on in the next with the same samples."""
    assert Order(1000, 8, seed=3).ids(range(124, 126))[1].tolist() == [
        894,
        315,
        61,
        310,
        646,
        475,
        339,
        249,
    ]


def test_steps_cut_epochs_without_remainder() -> None:
    order = Order(samples=23, global_batch_size=10, seed=5)
    steps = order.ids(range(9))
    assert [len(ids) for ids in steps] == [10, 10, 3] * 3
    for epoch in range(3):
        assert sorted(np.concatenate(steps[3 * epoch : 3 * epoch + 3])) == list(range(23))
    for step in range(9):
        assert order.ids(range(step, step + 1))[0].tolist() == steps[step].tolist()


def test_a_changed_batch_goes_on_in_the_same_epoch() -> None:
    """After two steps of 10 out of 23, a batch of 4 first takes the 3 that are left, then whole
    epochs.
    """
    before = Order(23, 10, seed=5)
    after = Order(23, 4, seed=5, anchor=Anchor(step=2, epoch=0, consumed=20))
    assert after.ids(range(2, 3))[0].tolist() == before.ids(range(2, 3))[0].tolist()
    second = np.concatenate(after.ids(range(3, 9)))
    assert sorted(second) == list(range(23))
    assert second.tolist() == np.concatenate(before.ids(range(3, 6))).tolist()
    with pytest.raises(ValueError, match="before the anchor"):
        after.ids(range(1, 2))


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 6), (0.5, 2), (1.1, 4), (0.1, 1)])
def test_epochs_as_steps(epochs: float, steps: int) -> None:
    assert Order(23, 10, 0).steps_to(epochs) == steps


def test_epochs_as_steps_after_a_changed_batch() -> None:
    order = Order(23, 4, 0, Anchor(step=2, epoch=0, consumed=20))
    assert [order.steps_to(e) for e in (0.5, 1, 2)] == [2, 3, 9]


def test_the_epoch_of_a_step_is_that_of_its_position() -> None:
    for anchor in (Anchor(), Anchor(step=7, epoch=2, consumed=13), Anchor(5, 1, 0)):
        order = Order(23, 10, 0, anchor)
        for step in range(anchor.step, anchor.step + 20):
            assert order.epoch_of(step) == order.position(step).epoch
        assert order.epoch_of(anchor.step - 1) == anchor.epoch


@pytest.mark.parametrize(("samples", "micro"), [(64, 4), (50, 4), (3, 4), (7, 1), (1, 1)])
def test_lengths_lay_a_step_without_changing_it(samples: int, micro: int) -> None:
    """Neighbours in length share a microbatch; what is padded is little; and any half of the
    microbatches has about half of the tokens.
    """
    rng = np.random.default_rng(samples)
    ids, lengths = rng.permutation(1000)[:samples], rng.integers(1, 1000, samples)
    by_id = dict(zip(ids.tolist(), lengths.tolist(), strict=True))
    laid = by_length(ids, lengths, micro)
    assert sorted(laid) == sorted(ids)
    assert by_length(ids, lengths, micro).tolist() == laid.tolist()
    bounds = range(0, samples, micro)
    groups = [[by_id[i] for i in laid[first : first + micro].tolist()] for first in bounds]
    padded = sum(max(group) * len(group) for group in groups)
    unsorted = sum(max(lengths[first : first + micro]) * micro for first in bounds)
    assert padded <= unsorted
    if samples > 32:
        assert padded < 1.1 * lengths.sum() < unsorted
        half = len(groups) // 2
        assert sum(map(sum, groups[:half])) / lengths.sum() == pytest.approx(0.5, abs=0.08)
        falling = sorted(groups, key=sum, reverse=True)  # merely sorted, it would not be so
        assert sum(map(sum, falling[:half])) / lengths.sum() > 0.7
