"""What a user's code raises is its own, whatever it is; Ctrl-C is nobody's error."""

import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samecurve
from samecurve.errors import Interrupted, SamecurveError, UserError
from samecurve.tasks.user_class.user_errors import calling


class Stop(BaseException):
    """What some libraries derive their signals from."""


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, SystemExit])
def test_it_need_be_no_exception(kind: type[BaseException]) -> None:
    """A KeyboardInterrupt, where SIGINT does not raise one, is no Ctrl-C."""
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(UserError, match=rf"My.loss\(\): {kind.__name__}: mine"):
            _raise(kind("mine"))
    finally:
        signal.signal(signal.SIGINT, heard)


@pytest.mark.parametrize("kind", [Interrupted, KeyboardInterrupt])
def test_ctrl_c_passes(kind: type[BaseException]) -> None:
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup's child ignores it
    try:
        with pytest.raises(kind):
            _raise(kind())
    finally:
        signal.signal(signal.SIGINT, heard)


def test_a_peer_that_is_lost_in_the_forward_pass_is_nobody_s_error() -> None:
    """fsdp gathers there: each file that waits for a collective says so to calling()."""
    root = Path(samecurve.__file__).parent
    waiting = [
        path
        for room in ("torch_engine", "features")
        for path in (root / room).rglob("*.py")
        if re.search(r"(?:work|hook\(.*\))\.wait\(|original_wait\(", path.read_text())
    ]
    assert len(waiting) >= 8
    for path in waiting:
        code = compile("raise RuntimeError('Connection reset by peer')", str(path), "exec")
        lost = pytest.raises(RuntimeError, match=r"^Connection reset by peer$")
        with lost, calling("My.loss()", Path(__file__)):
            exec(code)


def _raise(error: BaseException) -> None:
    with calling("My.loss()", Path(__file__)):
        raise error


@pytest.mark.parametrize("raises", [False, True])
def test_a_copy_of_the_process_does_not_come_back(
    *, raises: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """os.fork in a loss: the copy would train the same run once more."""
    with warnings.catch_warnings(), calling("My.loss()", Path(__file__)):
        warnings.simplefilter("ignore")  # of threads that other tests have left
        copy = os.fork()
        if raises and not copy:
            raise ValueError("in the copy")
    _, status = os.waitpid(copy, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    said = capfd.readouterr().err
    assert said.count("My.loss() has forked this process, and the copy came back from it") == 1
    assert ("ValueError: in the copy" in said) == raises


class OneFake:
    """A GAN's script as it often is: the generator's output of one phase serves the other."""

    phases = {"critic": "critic.*", "generator": "generator.*"}

    def loss(self, phase: str) -> float:
        if phase == "critic":
            self.fake = 1.0
        return self.fake


class Heir(OneFake):
    """Its loss is inherited."""


class Typo(OneFake):
    def loss(self, phase: str) -> float:
        return len(phase) * float(self.fakes)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("task", "remedy"),
    [
        (OneFake(), "compute it in each phase"),
        (Heir(), "compute it in each phase"),
        (Typo(), "self.fakes = ..."),
    ],
)
def test_what_one_phase_kept_for_another_is_computed_in_each(task: OneFake, remedy: str) -> None:
    with pytest.raises(UserError) as raised, calling("loss()", Path(__file__)):
        task.loss("generator")
    assert remedy in raised.value.remedy


def test_an_input_of_another_type_than_the_weights_is_cast() -> None:
    with pytest.raises(UserError) as raised, calling("My.loss()", Path(__file__)):
        torch.nn.Linear(3, 3)(torch.ones(2, 3, dtype=torch.float64))
    assert "x.to(next(model.parameters()).dtype)" in raised.value.remedy


class Errors:
    """A task in which one line of each method is wrong, as people often write it."""

    def __init__(self) -> None:
        self.fields = {"width": 3}
        self.weight, self.teacher = torch.ones(2), nn.Linear(2, 2)

    def wrong_key(self, batch: Any) -> Any:
        return batch["lable"].sum() + batch["x"].sum()

    def wrong_key_in_lines(self, batch: Any) -> Any:
        return sum(
            [
                batch["x"].sum(),
                batch["image"].sum(),
            ]
        )

    def wrong_field(self, _batch: Any) -> Any:
        return nn.Linear(2, self.fields["widht"])

    def number_for_a_key(self, batch: Any) -> Any:
        return batch[0]

    def unpacked(self, batch: Any) -> Any:
        x, y, z = batch
        return x, y, z

    def unpacked_in_two(self, batch: Any) -> Any:
        x, label = batch
        return nn.functional.relu(x) + label

    def unpacked_and_asked(self, batch: Any) -> Any:
        x, _label = batch
        return x.view(-1)

    def attribute(self, batch: Any) -> Any:
        return batch.x

    def moved(self, batch: Any) -> Any:
        return batch.to("cpu")

    def moved_alone(self, batch: Any) -> Any:
        return batch["x"].cuda()

    def on_another_device(self, _batch: Any) -> Any:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found cuda:0 and cpu!"
        )

    def label_without_class(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(batch["x"], batch["label"] + 5)

    def label_of_floats(self, batch: Any) -> Any:
        return nn.functional.nll_loss(batch["x"], batch["label"].int())

    def index_without_row(self, batch: Any) -> Any:
        return nn.Embedding(2, 2)(batch["label"] + 7)

    def other_shape(self, batch: Any) -> Any:
        return nn.Linear(3, 2)(batch["x"])

    def kept_weight(self, batch: Any) -> Any:
        model = nn.Linear(2, 2).double()
        logits = model(batch["x"].double())
        return nn.functional.cross_entropy(
            logits.view(-1, 2), batch["label"], self.weight, reduction="sum"
        )

    def kept_teacher(self, batch: Any) -> Any:
        model = nn.Linear(2, 2).double()
        x = batch["x"].double()
        return model(x) - self.teacher(x)

    def made_input(self, _batch: Any) -> Any:
        model = nn.Linear(2, 2).double()
        noise = torch.ones(2, 2)
        return model(noise)

    def relative_path(self, _batch: Any) -> Any:
        return Path("rows.npy").read_bytes()

    def not_a_file(self, _batch: Any) -> Any:
        return Path("/").read_bytes()

    def other_letters(self, _batch: Any) -> Any:
        return b"caf\xe9".decode("utf-8")

    def whole_batch(self, batch: Any) -> Any:
        return nn.Linear(2, 2)(batch)

    def other_processes(self, _batch: Any) -> Any:
        return torch.distributed.get_rank()

    def unlike_all(self, _batch: Any) -> Any:
        raise ValueError("no such class: 7")


REMEDIES = {
    "wrong_key": 'batch is a mapping with the keys "x", "label"; did you mean label?',
    "wrong_key_in_lines": 'batch is a mapping with the keys "x", "label"',
    "wrong_field": 'self.fields is a mapping with the keys "width"; did you mean width?',
    "number_for_a_key": 'batch is a mapping with the keys "x", "label"',
    "unpacked": 'take its values by name, batch["x"], batch["label"]',
    "unpacked_in_two": 'take its values by name, batch["x"], batch["label"]',
    "unpacked_and_asked": 'take its values by name, batch["x"], batch["label"]',
    "attribute": 'it is a mapping: write ["x"] for .x',
    "moved": "leave .to() out: its tensors are on the run's device already",
    "moved_alone": "model and batch are on the run's device already",
    "on_another_device": "make the tensor on the batch's device: device=x.device",
    "label_without_class": "label 6 has no class: labels count from 0",
    "label_of_floats": "labels are whole numbers of 64 bits",
    "index_without_row": "num_embeddings must be larger than the largest index",
    "other_shape": "the input has 2 features in its last dimension, and the layer takes 3",
    "kept_weight": "self.weight is float32, and the run computes in float64 (as samecurve verify"
    " does): self.weight.to(logits.dtype)",
    "kept_teacher": "self.teacher.to(x.dtype); what model() returns takes the run's type by itself",
    "made_input": "noise.to(next(model.parameters()).dtype)",
    "relative_path": f"a relative path begins where samecurve is started, here {Path.cwd()}",
    "not_a_file": "remove or rename it, and run the same command again",
    "other_letters": "the file is not utf-8: open(path, encoding=...)",
    "whole_batch": 'batch is a mapping with the keys "x", "label": give one of them, batch["x"]',
    "other_processes": "leave the call out: a task's code sees one device",
    "unlike_all": "this line of your code raises the error: correct it there",
}


@pytest.mark.parametrize("method", REMEDIES)
def test_a_remedy_is_a_line_to_write(method: str) -> None:
    batch = {"x": torch.ones(2, 2), "label": torch.ones(2, dtype=torch.int64)}
    with pytest.raises(SamecurveError) as raised, calling("My.loss()", Path(__file__)):
        getattr(Errors(), method)(batch)
    assert REMEDIES[method] in raised.value.remedy


def test_every_method_with_an_error_has_its_remedy() -> None:
    assert {name for name in vars(Errors) if not name.startswith("_")} == REMEDIES.keys()
