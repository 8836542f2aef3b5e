"""Ranks that are slow in one place, to plant it: else each does what `profile` has a rank do."""

import time
from typing import Any
from unittest.mock import patch

import torch

from samecurve.core.determinism import Mean
from samecurve.core.protocols import Arrays
from samecurve.data import TokenWindows
from samecurve.errors import RunError
from samecurve.worker.context import RankContext
from samecurve.worker.jobs.profile_job import watch_rank
from samecurve.worker.jobs.train_job import rehearse
from samecurve_products.text.language.torch_task import TorchLanguage

SECONDS = 0.12  # well above what a busy machine does to a step of a few milliseconds
SIZE = 900
ROW = 0.02


def source(*arguments: Any) -> Any:
    """Each batch of data takes its time."""
    right = TokenWindows.__getitem__

    def slow(windows: TokenWindows, ids: Any) -> Any:
        time.sleep(SECONDS)
        return right(windows, ids)

    with patch.object(TokenWindows, "__getitem__", slow):
        return watch_rank(*arguments)


def forward(*arguments: Any) -> Any:
    """The model multiplies large matrices by the way."""
    right = TorchLanguage.loss
    large = torch.ones(SIZE, SIZE)

    def slow(task: TorchLanguage, model: Any, batch: Arrays) -> Mean:
        mean = right(task, model, batch)
        return Mean(mean.sum + 0 * (large @ large).sum(), mean.weight)

    with patch.object(TorchLanguage, "loss", slow):
        return watch_rank(*arguments)


def second_rank(index: int, *arguments: Any) -> Any:
    """The forward pass of the second rank takes longer than the first one's."""
    right = TorchLanguage.loss

    def slow(task: TorchLanguage, model: Any, batch: Arrays) -> Mean:
        time.sleep(SECONDS * index)
        return right(task, model, batch)

    with patch.object(TorchLanguage, "loss", slow):
        return watch_rank(index, *arguments)


def dies(index: int, *arguments: Any) -> Any:
    """The second rank ends without a word, but for its log."""
    if index == 1:
        import os

        print("the last word of a rank", flush=True)
        os._exit(3)
    return watch_rank(index, *arguments)


def _lasting(index: int) -> Any:
    """A forward pass lasts so long for each row, on the second rank three times as long.

    What this machine takes for it is within that, and hardly matters so.
    """
    right = TorchLanguage.loss

    def slow(task: TorchLanguage, model: Any, batch: Arrays) -> Mean:
        until = time.perf_counter() + len(batch["labels"]) * ROW * (1 + 2 * index)
        mean = right(task, model, batch)
        time.sleep(max(0.0, until - time.perf_counter()))
        return mean

    return patch.object(TorchLanguage, "loss", slow)


def rows(index: int, *arguments: Any) -> Any:
    with _lasting(index):
        return watch_rank(index, *arguments)


def rehearsed(index: int, *arguments: Any) -> None:
    with _lasting(index):
        rehearse(index, *arguments)


def fails_under_fsdp(index: int, group: Any, attempt: str, *arguments: Any) -> Any:
    """Every other strategy is measured."""
    if RankContext.read_warm(attempt, index).plan.layout.strategy == "fsdp":
        raise RunError("this one was planted", "take it out")
    return watch_rank(index, group, attempt, *arguments)
