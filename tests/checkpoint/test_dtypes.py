"""Buffers of every type are saved and restored bit by bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from checkpoint_files import FIXED
from commands import samecurve
from samecurve.checkpoint.format import load, make_manifest, write_pieces
from samecurve.checkpoint.store import newest
from samecurve.core.system import write_json
from samecurve.torch_engine.checkpoint import digests, gather, restore
from samecurve.torch_engine.optimizers import BuiltInOptimizer, optimizer_params
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.step import State
from samecurve.torch_engine.strategies import Strategy
from tiny import config_of, tiny_values

CPU = torch.device("cpu")
VALUES = {
    torch.bool: [True, False, True],
    torch.int8: [-128, 0, 127],
    torch.int16: [-(2**15), 1, 2**15 - 1],
    torch.int32: [-(2**31), 2**24 + 1, 2**31 - 1],
    torch.int64: [-(2**63), 2**53 + 1, 2**63 - 1],
    torch.uint8: [0, 1, 255],
    torch.uint16: [0, 1, 2**16 - 1],
    torch.uint32: [0, 2**24 + 1, 2**32 - 1],
    torch.uint64: [0, 2**53 + 1, 2**64 - 1],
    torch.bfloat16: [1e-38, 0.1, 3e38],
    torch.float16: [6e-8, 0.1, 65504],
    torch.float64: [5e-324, 0.1, 1e308],
}


def state(tmp_path: Path, values: Any = None) -> State:
    model = torch.nn.Linear(3, 2)
    for dtype, numbers in VALUES.items():
        buffer = torch.tensor(numbers if values is None else values, dtype=dtype)
        model.register_buffer(str(dtype).replace(".", "_"), buffer)
    trained = optimizer_params(model)
    fields = config_of(tiny_values(tmp_path)).optimizer
    return State(model, trained, BuiltInOptimizer(fields, trained))


def test_every_type_comes_back_bit_by_bit(tmp_path: Path) -> None:
    before, after = state(tmp_path), state(tmp_path, [0, 0, 0])
    comm, nothing_asked = Comm(), cast("Any", None)
    strategy = Strategy(nothing_asked, comm, [CPU])
    alone: Any = SimpleNamespace(strategy=strategy, comm=comm, device=CPU)
    written = write_pieces(tmp_path / "rank.safetensors", gather(alone, before))
    loop: dict[str, Any] = {"metrics": {}, "best_value": None, "best_step": None, "skipped": 0}
    meta = {
        "step": 2,
        "epoch": 0,
        "consumed": 16,
        "config": {},
        "fixed": FIXED.to_json(),
        "loop": loop,
        "versions": {},
    }
    write_json(tmp_path / "manifest.json", make_manifest(meta, [vars(written)]))
    restore(alone, after, load(tmp_path, weights_only=True))
    for (name, one), two in zip(before.model.named_buffers(), after.model.buffers(), strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), name
    assert digests(alone, before) == digests(alone, after)


TASK = """\
import numpy as np, torch
from samecurve import Mean

class Rows:
    def __len__(self):
        return 16
    def __getitem__(self, ids):
        return {"x": np.asarray(ids, dtype="float32")[:, None] / 16}

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 4)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("ids", torch.tensor([2**24 + 1, -7], dtype=torch.int32))
        self.register_buffer("short", torch.tensor([-5], dtype=torch.int16))
    def forward(self, x):
        return super().forward(x)[:, self.mask]

class Task:
    def __init__(self, model, data): ...
    def model(self):
        return Net()
    def train_data(self):
        return Rows()
    def loss(self, model, batch):
        return Mean(model(batch["x"]).square().sum(), len(batch["x"]))
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(["cpu:2", "fsdp"], ["cpu", "single"], marks=pytest.mark.long),
        pytest.param(["cpu:2", "ddp"], ["cpu:2", "dp"], marks=pytest.mark.long),
        pytest.param(["cpu", "single"], ["cpu:2", "fsdp"], marks=pytest.mark.long),
    ],
)
def test_a_run_whose_model_has_such_buffers(
    first: list[str], second: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "c.yaml").write_text("task: mine.py:Task\nbatch: {samples: 8}\ntrain: {steps: 4}\n")
    train = ["train", "-f", "c.yaml", "--save-dir", "run"]
    for layout, more in ((first, ["--stop-after", 2]), (second, [])):
        use, strategy = layout
        samecurve(*train, "--devices", use, "--strategy", strategy, *more, cwd=tmp_path)
    samecurve("export", "run", "--to", "out", cwd=tmp_path)
    samecurve(*train[:-1], "other", "--init-from", "run", "--devices", "cpu", cwd=tmp_path)
    for run in ("run", "other"):
        path, _ = newest(tmp_path / run / "checkpoints")
        assert path is not None
        arrays = load(path).arrays
        assert arrays["model/mask"].dtype == np.bool_
        assert arrays["model/mask"].tolist() == [True, False, True, True]
        assert arrays["model/ids"].tolist() == [2**24 + 1, -7]
        assert arrays["model/short"].dtype == np.int16
