"""The task that the fault campaign trains: tiny, in f64, about 20 ms a step.

Importing this file in a rank makes the process a test build: planted.py wraps functions of ours and
of torch's, which then fail where plants.json says so.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve import Mean

sys.path.insert(0, str(Path(__file__).parent))
import planted
from chaos_rows import FEATURES, SAMPLES, Floats, features

STEP_SECONDS = 0.015
READ_SECONDS = 0.002  # not so quick that the data of several steps are read at once

PLANTS = planted.Plants.of_this_process()
PLANTS.wrap()
PLANTS.reach("import")


class Rows:
    """The samples, computed, or read from a file where one is named."""

    def __init__(self, samples: int, data: dict[str, Any]) -> None:
        self._samples, self._file = samples, data.get("file")
        self._nan = data.get("nan", -1)  # this sample's features are not finite
        self._mapped = None
        if data.get("mapped"):
            self._mapped = np.memmap(
                str(self._file), dtype=np.float64, mode="r", shape=(SAMPLES, FEATURES)
            )

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        ids = np.asarray(ids)
        time.sleep(READ_SECONDS)
        PLANTS.reach("data")
        x = self._read(ids)
        x[ids == self._nan] = np.nan
        return {"x": x}

    def _read(self, ids: Floats) -> Floats:
        if self._file is None:
            return features(ids)
        if self._mapped is not None:
            return np.array(self._mapped[ids])
        rows: Floats = np.fromfile(self._file).reshape(SAMPLES, FEATURES)
        return rows[ids]


class Task:
    def __init__(self, model: Any, data: Any) -> None:
        del model
        self._data = dict(data)

    def model(self) -> nn.Module:
        PLANTS.reach("model")
        return nn.Sequential(nn.Linear(FEATURES - 1, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Mean:
        PLANTS.reach("forward" if PLANTS.is_training else "split check")
        if PLANTS.is_training:
            time.sleep(STEP_SECONDS + PLANTS.slower)
        inputs, wanted = batch["x"][:, :-1], batch["x"][:, -1:]
        loss = ((model(inputs) - wanted) ** 2).sum()
        if PLANTS.spoils_loss:
            loss = loss * float("nan")
        if loss.requires_grad:
            loss.register_hook(lambda _: PLANTS.reach("backward"))
        return Mean(loss, len(batch["x"]))

    def train_data(self) -> Rows:
        return Rows(SAMPLES, self._data)

    def eval_data(self) -> Rows:
        return Rows(20, {})


assert os.environ.get("CHAOS_HOME"), "this task belongs to the fault campaign"
