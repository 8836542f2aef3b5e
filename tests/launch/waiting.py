"""A task whose second rank goes wrong after some steps: how, says data.how.

The file data.once is made first, so that it happens once; in a directory that does not exist, it
happens in every start.
"""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Rows:
    def __init__(self, how: str, once: str) -> None:
        self.how, self.once, self.read = how, Path(once), 0

    def __len__(self) -> int:
        return 256

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        time.sleep(0.002)  # not so quick that several steps are read at once
        self.read += len(ids)
        # 112 of steps, beside the 128 that are looked at for the split check
        if self.read > 240 and os.environ.get("RANK") == "1" and not self.once.exists():
            if self.once.parent.exists():
                self.once.touch()
            if self.how == "sleep":
                time.sleep(1000)
            if self.how == "raise":
                raise ValueError("a planted fault")
            if self.how == "EIO":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if self.how == "leave":
                os._exit(0)
            os.kill(os.getpid(), getattr(signal, self.how))
        return {"x": np.sin(np.outer(np.asarray(ids) + 1.0, np.arange(1, 9)))}


class Task:
    def __init__(self, model: Any, data: Any) -> None:
        del model
        self.data = data

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Mean:
        return Mean((model(batch["x"]) ** 2).sum(), len(batch["x"]))

    def train_data(self) -> Rows:
        return Rows(self.data["how"], self.data["once"])
