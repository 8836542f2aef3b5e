"""Data workers: the same batches as without them; one that dies is named, and the same command goes
on.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from commands import losses, samecurve
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.errors import START_AGAIN, RunError, UserError
from samecurve.tasks import Tasks, open_task
from samecurve.worker.data_workers import DataWorkers

TASK = """
import os, signal, threading
import numpy as np
import torch
from samecurve import Mean

class Rows:
    def __init__(self, count, first):
        self.count, self.first = count, first
        self.lock, self.shift = threading.Lock(), lambda x: x  # nothing of this could be pickled

    def __len__(self):
        return self.count

    def __getitem__(self, ids, epoch):
        if os.path.exists("die") and 6 in ids and self.first == 0:  # a start reads others
            os.kill(os.getpid(), signal.SIGKILL)
        if self.first and 5 in ids and os.path.exists("bad"):
            raise ValueError("a bad picture")
        x = np.stack([np.random.default_rng(self.first + i).normal(size=3) for i in ids])
        half, none = x[:, :1].astype(np.float16), np.zeros((len(ids), 0))
        return {"id": ids, "x": self.shift(x) + epoch, "half": half, "none": none}

    def fingerprint(self):
        return "normal"

class Sums:
    def model(self):
        return torch.nn.Linear(3, 1, dtype=torch.float64)

    def loss(self, model, batch):
        errors = model(batch["x"]) - batch["x"].sum(-1, keepdim=True)
        return Mean((errors ** 2).sum(), len(errors))

    def train_data(self):
        return Rows(23, 0)

    def eval_data(self):
        return Rows(11, 1000)
"""


def config(home: Path) -> Config:
    (home / "sums.py").write_text(TASK)
    values = {
        "task": f"{home / 'sums.py'}:Sums",
        "model": {},
        "data": {"workers": 3},
        "batch": {"samples": 10, "accumulate": 2},
        "train": {"steps": 9, "precision": "f64"},
        "devices": {"use": "cpu:2"},
    }
    return load_document(Document(values), Tasks()).config


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[tuple[Config, DataWorkers]]:
    sums = config(tmp_path)
    opened = DataWorkers(sums, 3, tmp_path / "stacks")
    yield sums, opened
    opened.kill()


def test_who_reads_changes_nothing_and_a_death_is_named(
    readers: tuple[Config, DataWorkers],
) -> None:
    sums, opened = readers
    task: Any = open_task(sums, "")
    sums_plan = plan(sums, Machine(devices=(), links=(), host_bytes=8 << 30, cores=2), task.facts())

    def batches(workers: Any, prefetch: int) -> list[list[Any]]:
        feed = Feed(
            sums_plan,
            [1],
            task.train_data(),
            {"eval": task.eval_data()},
            lambda rounds, _of: [batch.arrays for (batch,) in rounds if batch],
            start=1,
            prefetch=prefetch,
            workers=workers,
        )
        read = []
        for step, batch in feed:
            read.append(batch.rounds)
            if step % 3 == 0:  # while the thread reads ahead
                read += feed.evaluation()
        return [[array.tolist() for rows in rounds for array in rows.values()] for rounds in read]

    assert batches(opened.workers, 2) == batches(opened.workers, 0) == batches(None, 2)
    ids = np.arange(3, 8)
    assert {
        name: (array.dtype, array.shape) for name, array in opened.workers.ask(0, ids, 0)().items()
    } == {name: (array.dtype, array.shape) for name, array in task.train_data()[ids].items()}
    later = opened.workers.ask(0, ids, 2)()["x"]
    np.testing.assert_array_equal(later, task.train_data()[ids]["x"] + 2)

    server = next(
        child
        for child in psutil.Process().children()
        if "samecurve.worker.data_workers" in child.cmdline()
    )
    victim = server.children()[1]
    os.kill(victim.pid, signal.SIGSTOP)
    rows = [opened.workers.ask(0, ids, 0) for _ in range(3)]  # one each
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(
        RunError,
        match=r"data worker 1 of 3 was ended by SIGKILL while it read samples 3, 4, 5, 6, 7;",
    ):
        read(rows)
    deadline = time.monotonic() + 5
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read(rows: list[Callable[[], Any]]) -> None:
    for wait_for in rows:
        wait_for()


def test_what_a_source_raises_comes_back_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").touch()
    opened = DataWorkers(config(tmp_path), 1, tmp_path / "stacks")
    try:
        with pytest.raises(UserError, match="ValueError: a bad picture") as caught:
            opened.workers.ask(1, np.array([5]), 0)()
        assert caught.value.where == "sums.py:19"
    finally:
        opened.kill()


@pytest.mark.long
def test_a_run_goes_on_after_a_workers_death(tmp_path: Path) -> None:
    config(tmp_path)
    (tmp_path / "sums.yaml").write_text(
        "task: sums.py:Sums\nbatch: {samples: 10}\ntrain: {steps: 12, save_every: 2, precision:"
        " f64}\n"
    )
    line = ("train", "-f", "sums.yaml", "--num-workers", 2, "--save-dir")
    samecurve(*line, "whole", cwd=tmp_path)
    (tmp_path / "die").touch()
    error = samecurve(*line, "run", cwd=tmp_path, code=START_AGAIN).stderr
    assert error.count("was ended by SIGKILL while it read samples") == 1
    assert "Traceback" not in error
    (tmp_path / "die").unlink()
    samecurve(*line, "run", cwd=tmp_path)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
