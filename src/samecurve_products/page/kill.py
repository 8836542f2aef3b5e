"""Kill a run's launcher: two requests to leave, as a user presses Ctrl-C twice, then the kernel.

The launcher ends its ranks itself, and the system ends them with it. A process is named to the
kernel by a descriptor that was opened before it was verified, so a signal can reach no other one.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from samecurve.seam import Run
from samecurve_products.page.errors import RefusedError
from samecurve_products.page.lock_file import launcher

_BETWEEN = 0.3  # seconds: signals that are closer count as one (launch/__init__.py)
_PATIENCE = 10.0  # seconds until SIGKILL


def kill(run: Run) -> str:
    """Kill the launcher of a live run. Returns what is done, as a sentence.

    RefusedError: there is no launcher of this host that could be killed.
    """
    process = launcher(run)
    if isinstance(process, str):
        raise RefusedError(409, f"this run can't be killed: {process}", "reload the page")
    opened = _open(process.pid)
    if opened is None:
        return "the launcher had ended already"
    again = launcher(run)  # now that the descriptor is open, the process can't be another one
    if isinstance(again, str) or again != process:
        os.close(opened)
        return "the launcher had ended already"
    _send(opened, signal.SIGTERM)
    time.sleep(_BETWEEN)
    _send(opened, signal.SIGTERM)
    threading.Thread(target=_make_sure, args=(opened,), name="kill", daemon=True).start()
    return f"killed: process {process.pid} and its ranks end now; Resume goes on from the last save"


def _open(pid: int) -> int | None:
    """A descriptor of a process. None: the process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise RefusedError(409, f"process {pid} can't be reached: {error.strerror}") from None


def _send(opened: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(opened, number)


def _make_sure(opened: int, wait: Callable[[int], bool] | None = None) -> None:
    """Kill the process, if it has not left after some seconds."""
    has_ended = (wait or _wait)(opened)
    if not has_ended:
        with suppress(OSError):
            signal.pidfd_send_signal(opened, signal.SIGKILL)
    os.close(opened)


def _wait(opened: int) -> bool:
    """Whether the process ends in time: its descriptor becomes readable then."""
    poller = select.poll()
    poller.register(opened, select.POLLIN)
    return bool(poller.poll(_PATIENCE * 1000))
