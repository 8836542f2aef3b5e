"""Turns of the sides of benchmarks/gpu.py and hf_gpu.py, each in a process of its own.

A turn that fails, runs out of memory, breaks the device's context or hangs ends alone: its side is
left out from then on, with the reason, and the others go on. A turn writes its answer as soon as
its steps are timed, so a failure after that (of the profiler, of a library at its end) costs
nothing. The process that starts the turns never opens the device.
"""

import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

ABOUT = "about"  # the first turn: what is measured, and on which device; no side has this name
GOLDEN = "golden"  # the turn that compares losses with golden ones; no side has this name
_MEMORY = re.compile("out of memory|allocate memory", re.IGNORECASE)  # CUDA's words, and the CPU's
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedError(BaseException):
    """A signal asked the benchmark to end. Nothing but its main function catches this."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.words = f"stopped by {signal.Signals(number).name}"


@dataclass
class Found:
    """Results of a side. seconds: of a step, by turn. memory: peak bytes; None on a CPU."""

    seconds: list[float] = field(default_factory=list)
    memory: int | None = None
    profile: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turns:
    """How a turn is started. words: the benchmark's own flags. limit: seconds a turn may take."""

    module: str
    words: tuple[str, ...]
    home: Path
    limit: float

    def take(self, name: str, *flags: str) -> tuple[dict[str, Any], str]:
        """Run one turn: its last answer ({} if none), and why it failed ("" if it did not)."""
        answer = self.home / "answer.json"
        answer.unlink(missing_ok=True)
        command = [sys.executable, "-m", self.module, *self.words, *flags]
        # Ctrl-C reaches the whole terminal: a turn inherits that it is ignored, and leaves it to
        # the process that waits here
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process = subprocess.Popen([*command, "--turn", name, "--answer", str(answer)])
        signal.signal(signal.SIGINT, before)
        try:
            code = process.wait(self.limit)
            reason = _why(code)
        except subprocess.TimeoutExpired:
            reason = f"no end after {self.limit:g} s (--limit)"
        finally:
            _end(process)
        known: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
        return known, known.pop("failed", reason) if reason else ""


def _why(code: int) -> str:
    if code == -signal.SIGKILL:
        return "ended by SIGKILL, which is what the system sends when the host's memory runs out"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a turn that still runs, and the processes that it started."""
    if process.poll() is not None:
        return
    turn = psutil.Process(process.pid)
    for one in [turn, *turn.children(recursive=True)]:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def take_turns(
    turns: Turns,
    sides: Sequence[str],
    count: int,
    *,
    flags: Sequence[str],
    found: dict[str, Found],
    skipped: dict[str, str],
    keep: Callable[[], object],
) -> None:
    """Measure each side `count` times, in turn.

    found: gets the results. skipped: gets the reason of each side that failed. keep: is called
    after every turn.
    """
    found.update({name: Found() for name in sides if name not in skipped})
    for turn in range(count):
        for name, one in found.items():
            if name in skipped:
                continue
            answer, reason = turns.take(name, *flags, *(() if one.profile else ("--profile",)))
            if "seconds" in answer:
                one.seconds.append(answer["seconds"])
                one.memory = answer["memory"]
                one.profile = answer.get("profile") or one.profile
                print(
                    f"turn {turn + 1}  {name}  {answer['seconds'] * 1e3:.1f} ms a step", flush=True
                )
            if reason:
                after = ", after its timed steps" if "seconds" in answer else ""
                skipped[name] = f"turn {turn + 1}{after}: {reason}"
                print(f"turn {turn + 1}  {name}  left out{after}: {reason}", flush=True)
            keep()


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise StoppedError for Ctrl-C, SIGTERM and SIGHUP while the block runs."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        raise StoppedError(number)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_answer(place: Path, answer: Mapping[str, Any]) -> None:
    """Replace the answer in one step, so that a kill leaves the last whole one."""
    part = place.with_suffix(".part")
    part.write_text(json.dumps(answer))
    part.replace(place)


def answered(place: Path, turn: Callable[[Callable[[Mapping[str, Any]], None]], None]) -> NoReturn:
    """Run a turn in this process, and exit. turn: takes the function that adds to the answer."""
    answer: dict[str, Any] = {}

    def add(values: Mapping[str, Any]) -> None:
        answer.update(values)
        write_answer(place, answer)

    code = 0
    try:
        turn(add)
    except Exception as error:  # any library's: the reason goes to the results
        traceback.print_exc()
        add({"failed": _in_words(error)})
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no library's clean-up may hang or fail here


def _in_words(error: Exception) -> str:
    line = str(error).strip().split("\n")[0]
    words = f"{type(error).__name__}: {line}" if line else type(error).__name__
    is_memory = isinstance(error, MemoryError) or _MEMORY.search(line)
    return f"{words[:300]} (a smaller --micro holds for every side)" if is_memory else words[:300]
