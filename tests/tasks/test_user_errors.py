"""What a user's code raises is its own, whatever it is; Ctrl-C is nobody's error."""

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch

from samecurve.errors import Interrupted, UserError
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
    assert raised.value.remedy.endswith("x.to(next(model.parameters()).dtype)")
