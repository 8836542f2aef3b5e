"""Steps of a JaxEngine watched: some as the loop queues them, some waited for one by one, some
under jax's profiler.

A step is one program, so the clock sees the whole of it; of what it consists, the profiler says,
instruction by instruction.
"""

import re
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

from samecurve.core.profile_types import Operation, ProfileSchedule, RankProfile, Step
from samecurve.core.protocols import Batch
from samecurve.jax_engine.engine import JaxEngine

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-", "all-to-all", "psum")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", re.MULTILINE
)
_SOURCE = re.compile(r'op_name="([^"]*)"')
_Timing = tuple[int, int, str]  # begin, end (nanoseconds), instruction


@dataclass(frozen=True)
class _TimedStep:
    """A step's times.

    began, called: of the call that queued it. done: when the device had done it.
    """

    wait: float
    samples: int
    began: float
    called: float
    done: "Future[float]"


class JaxWatch:
    """scratch: for what the profiler writes. trace: where its trace goes, None: nowhere."""

    def __init__(
        self, engine: JaxEngine, course: ProfileSchedule, scratch: Path, trace: Path | None
    ) -> None:
        self._engine, self._course, self._scratch, self._trace = (
            engine,
            course,
            scratch / "jax",
            trace,
        )
        self._waiter = ThreadPoolExecutor(1, "samecurve-watch")
        self._steps: list[_TimedStep] = []
        self._operations: tuple[Operation, ...] = ()
        self._memory: dict[str, int] = {}
        self._peaks: tuple[int, ...] = ()

    def step(self, state: Any, batch: Batch, lr: float, asked: Sequence[int]) -> Any:
        number, course = batch.step, self._course
        if number == course.tracer + 1:
            self._begin_trace()
        began = time.perf_counter()
        done = self._engine.step(state, batch, lr, asked)
        called = time.perf_counter()
        self._steps.append(
            _TimedStep(
                batch.wait_seconds,
                batch.samples,
                began,
                called,
                self._waiter.submit(_wait_done, done[1].values),
            )
        )
        if number == 0 or number >= course.tracer - 1:
            self._steps[-1].done.result()
        if number == course.tracer - 1:
            self._peaks = self._engine.peak_memory_by_device()  # before the profiler adds to them
        if course.traced and number == course.last - 1:
            self._end_trace(done[0], batch)
        return done

    def found(self) -> RankProfile:
        course, taken = self._course, self._steps
        self._waiter.shutdown()
        steps = [
            _step(before.done.result(), this)
            for before, this in zip(
                taken[course.warm - 1 :], taken[course.warm : course.tracer], strict=False
            )
        ]
        traced = (
            statistics.mean(
                this.done.result() - this.began for this in taken[course.tracer + 1 : course.last]
            )
            if course.traced
            else 0.0
        )
        queueing = statistics.median(
            this.called - this.began for this in taken[course.warm : course.tracer]
        )
        return RankProfile(
            0,
            tuple(steps),
            traced,
            self._operations,
            self._memory,
            self._peaks,
            taken[0].done.result() - taken[0].began,
            queueing=queueing,
            trace=str(self._trace) if self._trace else None,
        )

    def _begin_trace(self) -> None:
        options = ProfileOptions()
        options.python_tracer_level = 0  # each Python call: slow, and none of it computes
        jax.profiler.start_trace(str(self._scratch), profiler_options=options)

    def _end_trace(self, state: Any, batch: Batch) -> None:
        jax.profiler.stop_trace()
        home = next(self._scratch.glob("plugins/profile/*"))
        if self._trace:
            shutil.move(next(home.glob("*.trace.json.gz")), self._trace)
        timings = _timings(ProfileData.from_file(str(next(home.glob("*.xplane.pb")))))
        exact = self._engine.plan.exact
        program = (
            None if exact else self._engine.compiled_step(state, batch)
        )  # exact: several programs
        named = _instructions(program.as_text()) if program else {}
        self._operations = _operations(
            timings, named, self._course.traced * len(self._engine.plan.devices_of(0))
        )
        self._memory = _state_bytes(self._engine, state[0] if exact else state)
        if program and (found := program.memory_analysis()):
            self._memory["temporary"] = int(found.temp_size_in_bytes)


def _wait_done(values: jax.Array) -> float:
    """When they were there: asked for in a thread of its own, so that the loop goes on as it always
    does.
    """
    jax.block_until_ready(values)
    return time.perf_counter()


def _step(before: float, this: _TimedStep) -> Step:
    """before: when the device had done the step before."""
    idle = max(0.0, this.began - before)
    whole = this.done.result() - before
    return Step(whole, this.samples, {"data": min(this.wait, idle), "device": whole - idle})


def _timings(data: Any) -> list[list[_Timing]]:
    """By line of the trace (a thread, or a GPU's stream), what ran of compiled programs."""
    planes = list(data.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    lines = [
        line
        for plane in gpus or planes
        for line in plane.lines
        if not gpus or line.name.startswith("Stream")
    ]
    return [list(_instruction_events(line.events)) for line in lines]


def _instruction_events(events: Iterable[Any]) -> Iterator[_Timing]:
    for event in events:
        name = next((value for key, value in event.stats if key == "hlo_op"), None)
        if name:
            yield int(event.start_ns), int(event.start_ns + event.duration_ns), str(name)


def exclusive_times(timings: Sequence[_Timing]) -> list[tuple[str, int]]:
    """Nanoseconds of each without those inside it, as a loop has its body inside."""
    found: list[tuple[str, int]] = []
    open_: list[tuple[int, int]] = []  # end; place in found
    for begin, end, name in sorted(timings, key=lambda timing: (timing[0], -timing[1])):
        while open_ and open_[-1][0] <= begin:
            open_.pop()
        if open_:
            outer, took = found[open_[-1][1]]
            found[open_[-1][1]] = outer, took - (end - begin)
        open_.append((end, len(found)))
        found.append((name, end - begin))
    return found


def _operations(
    lines: Sequence[Sequence[_Timing]], named: dict[str, tuple[str, str]], runs: int
) -> tuple[Operation, ...]:
    """runs: how often each device's program ran, all devices together. named: see _instructions."""
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for line in lines:
        for name, took in exclusive_times(line):
            calls[name] = calls.get(name, 0) + 1
            seconds[name] = seconds.get(name, 0.0) + took / 1e9
    found = []
    for name, whole in sorted(seconds.items(), key=lambda item: -item[1]):
        opcode, what = named.get(name, (name, ""))
        found.append(
            Operation(
                name,
                what,
                calls[name] / runs,
                whole / runs,
                opcode.replace("_", "-").startswith(_COLLECTIVES),
            )
        )
    return tuple(found)


def _instructions(text: str) -> dict[str, tuple[str, str]]:
    """Of a compiled program: name -> its operation; its shape, and what in the model it was made
    from (of a fusion: its last part).
    """
    found = {}
    for name, shape, opcode, rest in _INSTRUCTION.findall(text):
        source = _SOURCE.search(rest)
        origin = "/".join(part for part in source[1].split("/")[-3:] if part) if source else opcode
        found[name] = opcode, f"{re.sub(r'{[^}]*}', '', shape)} {origin}"
    return found


def _state_bytes(engine: JaxEngine, state: Any) -> dict[str, int]:
    """Bytes on one device."""
    found = {"weights": 0, "optimizer": 0}
    for name, array in engine.named_arrays(state):
        found["weights" if name.startswith("model/") else "optimizer"] += array.addressable_shards[
            0
        ].data.nbytes
    return found
