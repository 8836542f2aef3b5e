"""A task's members are looked up once, and a step pays for those that the class has."""

import gc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samecurve import Mean
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.protocols import Progress
from samecurve.errors import RunError, UserError
from samecurve.tasks import Tasks
from samecurve.tasks.adapter.torch_adapter import TorchAdapter
from samecurve.tasks.protocol import MEMBERS, TaskMethods


class Rows:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, ids: Any) -> Mapping[str, Any]:
        return {"x": np.asarray(ids, np.float32)[:, None]}


class Plain:
    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Rows:
        return Rows()

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Mean:
        return Mean(model(batch["x"]).sum(), len(batch["x"]))


class Phased(Plain):
    phases = {"first": "weight", "second": "bias"}

    def loss(  # type: ignore[override]
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], epoch: int, phase: str
    ) -> Mapping[str, Mean]:
        self.heard = (epoch, phase)
        weight = model.get_parameter("weight")
        return {"loss": super().loss(model, batch), "other": Mean(weight.sum(), 1)}


class WholeBatch:
    phases = Phased.phases
    model, train_data = Plain.model, Plain.train_data

    def features(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], phase: str
    ) -> Mapping[str, torch.Tensor]:
        return {phase: model(batch["x"])}

    def batch_loss(self, features: Mapping[str, torch.Tensor], phase: str) -> Mean:
        return Mean(features[phase].sum(), len(features[phase]))


class Breaks(Plain):
    broken = False

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Mean:
        if self.broken:
            raise ValueError("a row without a label")
        return super().loss(model, batch)


def opened(task_class: type, tmp_path: Path) -> TorchAdapter:
    task = f"{__file__}:{task_class.__name__}"
    config = load_document(Document({"task": task, "batch": {"samples": 4}}), Tasks()).config
    return TorchAdapter(task_class, config, tmp_path, file=Path(__file__))


BATCH = {"x": torch.ones(4, 1)}


def test_every_member_has_its_place() -> None:
    assert vars(TaskMethods(object())).keys() == MEMBERS.keys()


def test_what_a_class_leaves_out_has_a_default(tmp_path: Path) -> None:
    task = opened(Plain, tmp_path)
    assert task.methods.loss == task.task.loss
    assert (task.optimizer, task.brings, task.lr_factor, task.phases) == (None, {}, None, {})
    exported = task.call("export", None, tmp_path)
    assert (task.assets(), task.sample(None, 0), exported) == ({}, [], None)
    assert (task.initial("weight", (1, 1)), task.init_module) == (None, None)


def files_called(call: Callable[[], object]) -> list[str]:
    """The file of each of our functions that a call enters, and of what it enters beside torch."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file != Path(__file__) and "torch" not in file.parts:
            files.append(file.name)

    gc.disable()  # what other tests have left has finalizers
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return [name for name in files if name not in ("<string>", "<namedtuple_Mean>")]


def test_a_plain_step_costs_a_few_calls_in_two_files(tmp_path: Path) -> None:
    task, ids = opened(Plain, tmp_path), np.arange(4)
    model = task.model()
    assert files_called(lambda: task.losses(model, BATCH)) == ["torch_adapter.py"] * 2
    read = files_called(lambda: task.train_data().read(ids, 0))
    assert read == ["opened_class.py", *3 * ["rows.py"]]


def test_a_loss_gets_what_it_asks_for(tmp_path: Path) -> None:
    task = opened(Phased, tmp_path)
    losses = task.losses(task.model(), BATCH, Progress(7, 3))
    assert task.task.heard == (3, "first")
    assert losses["loss"].sum.requires_grad
    assert not losses["other"].sum.requires_grad
    task.losses(task.model(), BATCH, Progress(7, 3), "second")
    assert task.task.heard == (3, "second")


def test_phases_of_a_loss_over_the_whole_batch_are_read(tmp_path: Path) -> None:
    task = opened(WholeBatch, tmp_path)
    assert task.phases == {"first": ("weight",), "second": ("bias",)}
    features = task.features(task.model(), BATCH, phase="second")
    assert list(features) == ["second"]
    assert task.batch_losses(features, phase="second")["loss"].weight == 4


def test_an_error_is_the_runs_once_the_loss_has_worked(tmp_path: Path) -> None:
    """An evaluation between, which takes no gradient, does not change that."""
    task = opened(Breaks, tmp_path)
    model = task.model()
    task.task.broken = True
    with pytest.raises(UserError, match=r"Breaks.loss\(\): ValueError: a row without a label"):
        task.losses(model, BATCH)
    task.task.broken = False
    task.losses(model, BATCH)
    with torch.no_grad():
        task.losses(model, BATCH)
    task.task.broken = True
    with pytest.raises(RunError, match=r"ValueError: a row without a label") as caught:
        task.losses(model, BATCH)
    assert f"{Path(__file__).name}:" in str(caught.value)
