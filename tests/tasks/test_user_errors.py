"""What a user's code raises is its own, whatever it is; Ctrl-C is nobody's error."""

import signal
from pathlib import Path

import pytest

from samecurve.errors import UserError
from samecurve.system import Interrupted
from samecurve.tasks.user_errors import calling


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
    with pytest.raises(kind):
        _raise(kind())


def _raise(error: BaseException) -> None:
    with calling("My.loss()", Path(__file__)):
        raise error
