"""Profile the steps of a JaxEngine.

Some steps run as the loop queues them, some are waited for one by one, some run under jax's
profiler. A step is one program, so a clock measures only the whole of it; the profiler measures its
instructions.
"""

import re
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions

from samecurve.core.measurement.profile_types import Operation, ProfileSchedule, RankProfile, Step
from samecurve.core.protocols import Batch
from samecurve.jax_engine.engine import JaxEngine
from samecurve.jax_engine.step_metrics import QueuedMetrics

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-", "all-to-all", "psum")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", re.MULTILINE
)
_SOURCE = re.compile(r'op_name="([^"]*)"')
_Timing = tuple[int, int, str]  # begin, end (nanoseconds), instruction


@dataclass(frozen=True, kw_only=True)
class _TimedStep:
    wait_seconds: float
    samples: int
    called_at: float  # when the call that queues the step began
    returned_at: float
    done_at: Future[float]  # when the device had done the step

    def seconds(self) -> float:
        return self.done_at.result() - self.called_at


class _HloInstruction(NamedTuple):
    """An instruction of a compiled program."""

    opcode: str
    description: str  # its shape, and the part of the model it comes from


class JaxWatch:
    """Times an engine's steps, and traces some of them."""

    def __init__(
        self, engine: JaxEngine, schedule: ProfileSchedule, scratch: Path, trace: Path | None
    ) -> None:
        """scratch: a directory for the profiler's files. trace: the file for its trace, or None."""
        self._engine = engine
        self._schedule = schedule
        self._scratch = scratch / "jax"
        self._trace = trace
        self._waiter = ThreadPoolExecutor(1, "samecurve-watch")
        self._steps: list[_TimedStep] = []
        self._operations: tuple[Operation, ...] = ()
        self._memory: dict[str, int] = {}
        self._peaks: tuple[int, ...] = ()

    def step(
        self, state: Any, batch: Batch, lr: float, requests: Sequence[int]
    ) -> tuple[Any, QueuedMetrics]:
        number, schedule = batch.step, self._schedule
        if number == schedule.tracer + 1:
            self._begin_trace()
        called_at = time.perf_counter()
        state, metrics = self._engine.step(state, batch, lr, requests)
        returned_at = time.perf_counter()
        step = _TimedStep(
            wait_seconds=batch.wait_seconds,
            samples=batch.samples,
            called_at=called_at,
            returned_at=returned_at,
            done_at=self._waiter.submit(_wait_done, metrics.values),
        )
        self._steps.append(step)
        if number == 0 or number >= schedule.tracer - 1:
            step.done_at.result()
        if number == schedule.tracer - 1:
            self._peaks = self._engine.peak_memory_by_device()  # before the profiler adds to them
        if schedule.traced and number == schedule.last - 1:
            self._end_trace(state, batch)
        return state, metrics

    def rank_profile(self) -> RankProfile:
        schedule, steps = self._schedule, self._steps
        self._waiter.shutdown()
        plain = steps[schedule.warm : schedule.tracer]
        before_each = steps[schedule.warm - 1 :]
        traced_seconds = 0.0
        if schedule.traced:
            traced = steps[schedule.tracer + 1 : schedule.last]
            traced_seconds = statistics.mean(step.seconds() for step in traced)
        return RankProfile(
            rank=0,
            steps=tuple(
                _step(before.done_at.result(), step)
                for before, step in zip(before_each, plain, strict=False)
            ),
            traced=traced_seconds,
            operations=self._operations,
            memory=self._memory,
            peaks=self._peaks,
            first=steps[0].seconds(),
            queueing=statistics.median(step.returned_at - step.called_at for step in plain),
            trace=str(self._trace) if self._trace else None,
        )

    def _begin_trace(self) -> None:
        options = ProfileOptions()
        options.python_tracer_level = 0  # tracing each Python call is slow
        jax.profiler.start_trace(str(self._scratch), profiler_options=options)

    def _end_trace(self, state: Any, batch: Batch) -> None:
        jax.profiler.stop_trace()
        home = next(self._scratch.glob("plugins/profile/*"))
        if self._trace:
            shutil.move(next(home.glob("*.trace.json.gz")), self._trace)
        timings = _timings(ProfileData.from_file(str(next(home.glob("*.xplane.pb")))))
        program = self._engine.compiled_step(state, batch)  # None: several, not described here
        instructions = _instructions(program.as_text() or "") if program else {}
        runs = self._schedule.traced * len(self._engine.plan.layout.devices_of(0))
        self._operations = _operations(timings, instructions, runs)
        self._memory = _state_bytes(self._engine, state)
        if program and (memory := program.memory_analysis()):
            self._memory["temporary"] = int(memory.temp_size_in_bytes)


def _wait_done(values: jax.Array) -> float:
    """Wait for values; returns when they were there. A thread of its own waits, not the loop."""
    jax.block_until_ready(values)
    return time.perf_counter()


def _step(previous_done_at: float, step: _TimedStep) -> Step:
    """previous_done_at: when the device had done the step before."""
    idle = max(0.0, step.called_at - previous_done_at)
    total = step.done_at.result() - previous_done_at
    return Step(total, step.samples, {"data": min(step.wait_seconds, idle), "device": total - idle})


def _timings(data: ProfileData) -> list[list[_Timing]]:
    """The timed instructions on each line of the trace (a thread, or a GPU's stream)."""
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
    """Nanoseconds of each instruction, without the instructions inside it (the body of a loop)."""
    times: list[tuple[str, int]] = []
    enclosing: list[tuple[int, int]] = []  # end; index in times
    for begin, end, name in sorted(timings, key=lambda timing: (timing[0], -timing[1])):
        while enclosing and enclosing[-1][0] <= begin:
            enclosing.pop()
        if enclosing:
            _, outer = enclosing[-1]
            outer_name, nanoseconds = times[outer]
            times[outer] = outer_name, nanoseconds - (end - begin)
        enclosing.append((end, len(times)))
        times.append((name, end - begin))
    return times


def _operations(
    lines: Sequence[Sequence[_Timing]], instructions: Mapping[str, _HloInstruction], runs: int
) -> tuple[Operation, ...]:
    """Calls and seconds a run of each instruction. runs: runs of the program on all devices."""
    calls: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for line in lines:
        for name, nanoseconds in exclusive_times(line):
            calls[name] += 1
            seconds[name] = seconds.get(name, 0.0) + nanoseconds / 1e9
    operations = []
    for name, total in sorted(seconds.items(), key=lambda item: -item[1]):
        opcode, description = instructions.get(name, _HloInstruction(name, ""))
        collective = opcode.replace("_", "-").startswith(_COLLECTIVES)
        operations.append(
            Operation(name, description, calls[name] / runs, total / runs, collective)
        )
    return tuple(operations)


def _instructions(text: str) -> dict[str, _HloInstruction]:
    """The instructions of a compiled program, by name; a fusion is named after its last part."""
    instructions = {}
    for name, shape, opcode, rest in _INSTRUCTION.findall(text):
        source = _SOURCE.search(rest)
        origin = "/".join(part for part in source[1].split("/")[-3:] if part) if source else opcode
        shape_without_layout = re.sub(r"{[^}]*}", "", shape)
        instructions[name] = _HloInstruction(opcode, f"{shape_without_layout} {origin}")
    return instructions


def _state_bytes(engine: JaxEngine, state: Any) -> dict[str, int]:
    """Bytes of weights and optimizer state on one device."""
    sizes = {"weights": 0, "optimizer": 0}
    for name, array in engine.named_arrays(state):
        kind = "weights" if name.startswith("model/") else "optimizer"
        sizes[kind] += array.addressable_shards[0].data.nbytes
    return sizes
