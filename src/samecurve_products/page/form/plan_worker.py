"""The plan worker as the server sees it: a process, started when it is needed, that answers.

It is started anew where a request takes too long, where it has ended, and where a user's file that
it has imported has changed. It is ended when nobody has asked for five minutes.

Each request holds a thread of the server while it waits for its turn. So only a few may wait, and a
task that hangs is waited for once: requests about it that came meanwhile get the same error.
"""

import json
import os
import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any, NoReturn

from samecurve.seam import Call, Process, child_environment, start_process, wait_for
from samecurve_products.page.form.worker import RESTART

_PATIENCE = 60.0  # seconds of a request
_IDLE = 300.0  # seconds
_MOST_AT_ONCE = 12  # requests
_READ_AT_ONCE = 1 << 16


class PlanRefusedError(Exception):
    """The worker refuses a request. errors: for the browser, each with cause and remedy."""

    def __init__(self, errors: Sequence[Mapping[str, str]]) -> None:
        super().__init__("; ".join(error.get("cause", "") for error in errors))
        self.errors = list(errors)


class PlanWorker:
    """Answers requests of any thread, one at a time."""

    def __init__(
        self, roots: Sequence[Path], *, patience: float = _PATIENCE, idle: float = _IDLE
    ) -> None:
        self._roots, self._patience, self._idle = [str(root) for root in roots], patience, idle
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._timer: threading.Timer | None = None
        self._asked = 0.0
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._is_closed = False
        self._hung: tuple[str, float] = ("", 0.0)  # the draft of a request that took too long, when
        # a process that dies with its parent dies with the thread that started it
        self._starter = ThreadPoolExecutor(1, "plan-worker")

    def ask(self, verb: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer. PlanRefusedError: the request is refused, or the worker ended."""
        if not self._places.acquire(blocking=False):
            _refuse(f"{_MOST_AT_ONCE} other requests wait for their plans", "try again in a minute")
        try:
            value = self._answer(verb, request)
        finally:
            self._places.release()
        if "errors" in value:
            raise PlanRefusedError(value["errors"])
        answer: dict[str, Any] = value["answer"]
        return answer

    def _answer(self, verb: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for a turn, and ask."""
        line = json.dumps({**request, "verb": verb}).encode() + b"\n"
        draft, came = _draft(request), time.monotonic()
        with self._lock:
            if self._hung[0] == draft and self._hung[1] > came:
                return self._took_too_long()
            self._asked = time.monotonic()
            value = self._exchange(line, draft)
            if RESTART in value:
                self._stop()
                value = self._exchange(line, draft)
            self._asked = time.monotonic()
            if self._timer is None or not self._timer.is_alive():
                self._look_again(self._idle)
            return value

    def close(self) -> None:
        """End the worker, whatever it does. Requests that wait are refused."""
        self._is_closed = True
        if process := self._process:
            process.kill()
        with self._lock:
            if self._timer:
                self._timer.cancel()
            self._stop()
        self._starter.shutdown()

    @property
    def pid(self) -> int | None:
        """The worker's process; None: none is running."""
        return self._process.pid if self._process else None

    def _exchange(self, line: bytes, draft: str) -> dict[str, Any]:
        """Send a request, and read its answer; an error in place of one that does not come."""
        if self._is_closed:
            _refuse("the server is ending", "start `samecurve ui` again")
        if self._process is None or self._process.poll() is not None:
            self._process = self._starter.submit(self._start).result()
        assert self._process is not None
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._read_line())
            return answer
        except TimeoutError:
            self._stop()
            self._hung = (draft, time.monotonic())
            return self._took_too_long()
        except (OSError, ValueError):
            code = self._stop()
            cause = f"the process that reads the task has ended (exit {code})"
            remedy = "does the task's file end the process? the terminal of `samecurve ui` shows"
            return _task_error(cause, remedy)

    def _took_too_long(self) -> dict[str, Any]:
        cause = f"the plan took more than {self._patience:g} s"
        remedy = "does the task's file compute or download while it is loaded? try again"
        return _task_error(cause, remedy)

    def _start(self) -> Process:
        call = Call(
            "samecurve_products.page.form.worker",
            self._roots,
            environment=child_environment(PYTHONUNBUFFERED="1"),
            new_session=True,  # Ctrl-C is for the server, which then ends it
        )
        return start_process(call, stdin=PIPE, stdout=PIPE, cwd=Path(self._roots[0]))

    def _read_line(self) -> bytes:
        """A whole line of the worker. TimeoutError: it takes too long. OSError: it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, read = self._process.stdout.fileno(), bytearray()
        until = time.monotonic() + self._patience
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not read.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                block = os.read(descriptor, _READ_AT_ONCE)
                if not block:
                    raise OSError("the worker has ended")
                read += block
        return bytes(read)

    def _stop(self) -> int | None:
        """End the worker. Returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        if not wait_for([process], 1.0):
            process.kill()
        code = process.wait()
        if process.stdout:
            process.stdout.close()
        return code

    def _look_again(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        """End a worker that nobody has asked for a while; look again later if somebody has."""
        with self._lock:
            left = self._asked + self._idle - time.monotonic()
            if left > 0:
                self._look_again(left)
            else:
                self._stop()
                self._timer = None


def _refuse(cause: str, remedy: str) -> NoReturn:
    raise PlanRefusedError([{"cause": cause, "remedy": remedy, "where": ""}])


def _task_error(cause: str, remedy: str) -> dict[str, Any]:
    return {"errors": [{"cause": cause, "remedy": remedy, "where": "task", "key": "task"}]}


def _draft(request: Mapping[str, Any]) -> str:
    """The part of a request that names its task: its base, and a task chosen instead."""
    values = request.get("values")
    task = values.get("task") if isinstance(values, Mapping) else None
    return json.dumps([request.get("base"), task])
