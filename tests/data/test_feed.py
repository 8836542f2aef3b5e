"""A feed gives a rank its share of each step, the same with and without a thread, from any step."""

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import until
from samecurve.core.determinism.data_order import Ids
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.core.protocols import Batch
from samecurve.data import IGNORED, TokenWindows, unlike_rows, window_count
from samecurve.data.feed import Feed
from tiny import config_of, tiny_values

FACTS = Facts.of(
    samples=23,
    eval_samples=7,
    tokens_per_sample=4,
    params=10,
    trainable=10,
    blocks=1,
    bytes_per_sample=1,
    flops_per_sample=1.0,
    coupled=(),
    fingerprint="",
)


class Itself:
    """Sample i is i, and the epoch that it was read for."""

    def __init__(self, count: int, bad: int | None = None, *, by_epoch: bool = False) -> None:
        self.count, self.bad, self.by_epoch = count, bad, by_epoch
        self.by_microbatch, self.seconds = False, 0.0  # of a read
        self.lengths: Ids | None = None
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, ids: Ids) -> dict[str, Any]:
        return self.read(ids, 0)

    def read(self, ids: Ids, epoch: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.reads.append(len(ids))
        if self.bad is not None and self.bad in ids:
            raise OSError(f"sample {self.bad} can't be read")
        return {"id": np.asarray(ids), "epoch": np.full(len(ids), epoch)}


def made(world: int, accumulate: int = 1) -> Plan:
    config = config_of(
        tiny_values(
            Path("x"),
            devices={"use": f"cpu:{world}"},
            batch={"accumulate": accumulate},
            train={"steps": 9},
        )
    )
    return plan(config, Machine(devices=(), links=(), host_bytes=8 << 30, cores=2), FACTS)


def ids(batch: Batch) -> list[int]:
    """What is trained on, by one device."""
    real = [microbatch for (microbatch,) in batch.rounds if microbatch and microbatch.real]
    return [int(i) for microbatch in real for i in microbatch.arrays["id"]]


def feed(
    world: int,
    device: int,
    *,
    prefetch: int = 0,
    start: int = 0,
    accumulate: int = 1,
    source: Itself | None = None,
) -> Feed:
    return Feed(
        made(world, accumulate),
        [device],
        source or Itself(23),
        {"eval": Itself(7)},
        lambda rounds, _of: list(rounds),
        start=start,
        prefetch=prefetch,
    )


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_together_see_the_order(world: int, accumulate: int) -> None:
    expected = [found.tolist() for found in made(1).order.ids(range(9))]
    shares = [list(feed(world, device, accumulate=accumulate)) for device in range(world)]
    for step in range(9):
        assert [i for share in shares for i in ids(share[step][1])] == expected[step]
        # a rank without a sample computes nothing
        assert all(bool(share[step][1].rounds) == bool(ids(share[step][1])) for share in shares)
        assert all(share[step][1].samples == len(expected[step]) for share in shares)


def test_rows_of_one_length_meet_in_a_microbatch() -> None:
    """The samples of a step stay, and so does what a microbatch has, whatever the devices."""
    source = Itself(23)
    source.lengths = np.random.default_rng(0).permutation(23) + 1
    expected = [sorted(found.tolist()) for found in made(1).order.ids(range(9))]
    of_worlds = []
    for world in (1, 2):
        shares = [
            list(feed(world, device, accumulate=4 // world, source=source))
            for device in range(world)
        ]
        microbatches = [
            [
                microbatch.arrays["id"].tolist()
                for share in shares
                for (microbatch,) in share[step][1].rounds
                if microbatch and microbatch.real
            ]
            for step in range(9)
        ]
        assert [sorted(itertools.chain(*step)) for step in microbatches] == expected
        of_worlds.append(microbatches)
    assert of_worlds[0] == of_worlds[1]
    for step in of_worlds[0]:
        lengths = [source.lengths[microbatch] for microbatch in step]
        apart = sorted((each.min(), each.max()) for each in lengths)
        assert all(first[1] < second[0] for first, second in itertools.pairwise(apart))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_thread_changes_nothing(prefetch: int) -> None:
    plain, ahead = (
        [(step, ids(batch)) for step, batch in feed(3, 1, prefetch=depth, start=4)]
        for depth in (0, prefetch)
    )
    assert plain == ahead
    assert [step for step, _ in ahead] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(("world", "device", "accumulate"), [(1, 0, 1), (3, 1, 4)])
def test_steps_that_are_read_at_once_are_the_same(
    world: int, device: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samecurve.data.feed._QUICK", 60)  # on a busy machine too
    source = Itself(23)
    together = [
        (step, ids(batch))
        for step, batch in feed(world, device, accumulate=accumulate, source=source)
    ]
    assert max(source.reads) > 10 // world + 1  # samples of one step at most
    monkeypatch.setattr("samecurve.data.feed._TOGETHER", 1)
    assert together == [
        (step, ids(batch)) for step, batch in feed(world, device, accumulate=accumulate)
    ]


@pytest.mark.parametrize(("world", "start"), [(1, 0), (3, 0), (3, 4)])
def test_rows_that_follow_the_epoch_are_read_for_that_of_their_step(
    world: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 samples in steps of 10: epochs end within what is read at once."""
    monkeypatch.setattr("samecurve.data.feed._QUICK", 60)  # on a busy machine too
    source, order = Itself(23, by_epoch=True), made(world).order
    for step, batch in feed(world, 0, start=start, source=source):
        microbatches = [one for one_round in batch.rounds for one in one_round if one]
        epochs = {int(epoch) for one in microbatches for epoch in one.arrays["epoch"]}
        assert microbatches or world > 1  # a rank may have no sample of an epoch's short last step
        assert epochs <= {order.position(step).epoch}, step
    assert start or max(source.reads) > 10 // world + 1  # of several steps
    held_out = [one for staged in feed(1, 0, start=start).evaluation() for (one,) in staged if one]
    assert {int(epoch) for one in held_out for epoch in one.arrays["epoch"]} == {0}


def test_a_sample_that_cant_be_read_spoils_no_step_before_it() -> None:
    found = iter(feed(1, 0, source=Itself(23, bad=int(made(1).order.ids(range(9))[2][0]))))
    assert [next(found)[0] for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="can't be read"):
        next(found)


def test_a_failure_that_does_not_come_again_is_one_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("samecurve.data.feed._QUICK", 60)  # on a busy machine too

    class Once(Itself):
        def read(self, ids: Ids, epoch: int) -> dict[str, Any]:
            if len(self.reads) == 2:  # of several steps
                self.reads.append(0)
                raise OSError("for a moment")
            return super().read(ids, epoch)

    found = iter(feed(1, 0, source=Once(23)))
    assert [next(found)[0] for _ in range(7)] == [
        *range(7)
    ]  # 1, 2 and 4 steps at once; the last four again by themselves
    with pytest.raises(OSError, match="for a moment"):
        next(found)


def test_evaluation_is_assigned_without_remainder() -> None:
    found = [
        int(i)
        for device in range(3)
        for staged in feed(3, device).evaluation()
        for (microbatch,) in staged
        if microbatch
        for i in microbatch.arrays["id"]
    ]
    assert found == list(range(7))


def test_a_fault_in_the_thread_reaches_the_loop() -> None:
    with pytest.raises(OSError, match="sample 5 can't be read"):
        list(feed(1, 0, prefetch=2, source=Itself(23, bad=5)))


def _has_read(source: Itself, times: int) -> bool:
    return len(source.reads) >= times


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_data_is_read_no_further_ahead_than_prefetch(prefetch: int) -> None:
    """A step at a time where that takes a while, so that what it holds is what the config says."""
    source = Itself(23)
    source.seconds = 0.002
    steps = iter(feed(1, 0, prefetch=prefetch, source=source))
    for trained in range(1, 9):
        next(steps)
        wanted = min(trained + prefetch, 9)
        until(partial(_has_read, source, wanted), timeout=5)
        time.sleep(0.006)  # in which a thread that reads further would
        assert len(source.reads) == wanted
    assert max(source.reads) == 10  # samples of one step
    list(steps)


def test_windows_predict_each_token_once(tmp_path: Path) -> None:
    """11 tokens in windows of 4: the last one holds two labels."""
    np.arange(11, dtype=np.uint16).tofile(tmp_path / "t.bin")
    windows = TokenWindows(tmp_path / "t.bin", "uint16", 0, 11, 4)
    assert len(windows) == window_count(11, 4) == 3
    rows = windows[np.array([2, 0])]
    assert rows["tokens"][1].tolist() == [0, 1, 2, 3]
    assert rows["labels"].tolist() == [[9, 10, IGNORED, IGNORED], [1, 2, 3, 4]]
    labels = windows[np.arange(3)]["labels"]
    assert sorted(labels[labels != IGNORED]) == list(range(1, 11))


def test_the_split_check_tries_unlike_samples() -> None:
    """One of each class that is to be seen, and the first of the rest."""
    label = np.zeros(100, dtype=np.int64)
    label[[40, 80, 90]] = 1, 2, 1
    rows = {"x": np.ones((100, 3)), "y": label, "tokens": np.arange(300).reshape(100, 3)}
    assert unlike_rows(rows, 100, 6) == [0, 1, 2, 3, 40, 80]
    assert unlike_rows({**rows, "id": np.arange(100)}, 100, 3) == [0, 1, 2]
    assert unlike_rows({"x": rows["x"]}, 100, 200) == list(range(100))
    boxes = np.full((100, 4), 91)  # "no object", as most of them are
    boxes[:, 0] = 7
    boxes[60, 0] = 91
    assert unlike_rows({**rows, "boxes": boxes}, 100, 4) == [0, 40, 60, 80]


@pytest.mark.parametrize("start", range(9))
def test_the_split_check_has_enough_samples_before_the_last_batch_of_an_epoch(start: int) -> None:
    """An epoch is two batches of 10 and one of 3."""
    order = made(1).order
    rows = feed(1, 0, start=start).trial_rows(8)
    assert rows.step == start
    assert len(set(rows.ids.tolist())) == 8
    coming = order.ids(range(start, start + 1))[0].tolist()
    assert set(coming) <= set(rows.ids.tolist()) or len(coming) > 8
