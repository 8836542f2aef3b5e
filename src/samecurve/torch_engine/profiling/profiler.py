"""Steps of a TorchEngine watched: some by the clock alone, some under torch's profiler, one for
what is kept for backward.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch._C._profiler import (
    _ExperimentalConfig,  # public nowhere; what it says is asked for by torch.profiler.profile
)
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from samecurve.core.profile_types import Operation, ProfileSchedule, RankProfile, Step
from samecurve.core.protocols import Batch
from samecurve.torch_engine.checkpoint import State
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.model import repeated_blocks
from samecurve.torch_engine.optimizer_params import local_view
from samecurve.torch_engine.profiling.timeline import (
    Span,
    TimedTimeline,
    seconds_between,
    seconds_by_phase,
)
from samecurve.torch_engine.step_metrics import peak_memory_bytes

_PARTS = {
    "forward": "forward",
    "backward": "backward",
    "sync": "sync",
    "clip": "optimizer",
    "optimizer": "optimizer",
}
_BETWEEN = (
    "rounds",
    "reduce",
    "spread",
)  # where several devices pass values on, or wait for each other
_COLLECTIVE = ("nccl", "gloo:", "c10d::")
_ENGINE = "autograd::engine::evaluate_function: "


@dataclass(frozen=True)
class _TimedStep:
    """A step's times, on the first device's clock."""

    wait: float
    samples: int
    begin: Any
    end: Any
    spans: list[list[Span]]


class TorchWatch:
    """trace: where the profiler's trace goes, None: nowhere."""

    def __init__(self, engine: TorchEngine, course: ProfileSchedule, trace: Path | None) -> None:
        self._engine, self._course, self._trace_path = engine, course, trace
        self._timeline = engine.comm.timeline = TimedTimeline(list(engine.devices))
        self._timed_steps: list[_TimedStep] = []
        self._profiler: Any = None
        self._activations = _ActivationMemory(len(engine.devices))
        self._first = self._traced = 0.0
        self._operations: tuple[Operation, ...] = ()
        self._memory: dict[str, int] = {}
        self._peaks: tuple[int, ...] = ()

    def step(self, state: State, batch: Batch, lr: float, asked: Sequence[int]) -> Any:
        number, course = batch.step, self._course
        began = time.perf_counter()
        if number == course.tracer < course.last:
            self._begin_trace()
        with (
            (
                self._activations.watching(state.model, self._timeline, self._engine.plan.compile)
                if number == course.last
                else nullcontext()
            ),
            self._timeline.timing_waits(),
        ):
            begin = self._timeline.now()
            done = self._engine.step(state, batch, lr, asked)
            self._timed_steps.append(
                _TimedStep(
                    batch.wait_seconds,
                    batch.samples,
                    begin,
                    self._timeline.now(),
                    self._timeline.take_spans(),
                )
            )
        if number == 0:
            self._drain()
            self._first = time.perf_counter() - began
        if number == course.tracer - 1:
            self._peaks = tuple(
                map(peak_memory_bytes, self._engine.devices)
            )  # before the profiler adds to them
        if course.tracer <= number < course.last:
            self._next_traced(number)
        if number == course.last:
            self._memory = {
                **_held(state),
                **(
                    {"activations": self._activations.most()}
                    if self._activations.complete(self._engine.plan.recompute)
                    else {}
                ),
            }
        return done

    def found(self) -> RankProfile:
        self._drain()
        course = self._course
        steps = [
            _step(before.end, taken, self._engine.plan.num_devices)
            for before, taken in zip(
                self._timed_steps[course.warm - 1 :],
                self._timed_steps[course.warm : course.tracer],
                strict=False,
            )
        ]
        kept = self._activations.by_module if "activations" in self._memory else {}
        return RankProfile(
            self._engine.comm.rank,
            tuple(steps),
            self._traced,
            self._operations,
            self._memory,
            self._peaks,
            self._first,
            kept,
            trace=str(self._trace_path) if self._trace_path else None,
        )

    def _drain(self) -> None:
        for device in self._engine.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _begin_trace(self) -> None:
        self._drain()
        gpu = [ProfilerActivity.CUDA] if self._engine.device.type == "cuda" else []
        self._timeline.around = lambda name, lane: record_function(f"samecurve/{name}")
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *gpu],
            schedule=schedule(wait=0, warmup=1, active=self._course.traced, repeat=1),
            record_shapes=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )  # dp's threads, too
        self._profiler.start()

    def _next_traced(self, number: int) -> None:
        if number == self._course.tracer:
            self._drain()
            self._traced = time.perf_counter()
        elif number == self._course.last - 1:
            self._drain()
            self._traced = (time.perf_counter() - self._traced) / self._course.traced
            self._end_trace()
            return
        self._profiler.step()

    def _end_trace(self) -> None:
        self._timeline.around = lambda name, lane: nullcontext()
        self._profiler.stop()
        if self._trace_path:
            self._profiler.export_chrome_trace(str(self._trace_path))
        self._operations = _operations(
            self._profiler.key_averages(group_by_input_shape=True),
            self._engine.device.type,
            self._course.traced,
        )
        self._profiler = None


def _step(before: Any, taken: _TimedStep, world: int) -> Step:
    """before: when the step before ended."""
    found = seconds_by_phase(taken.spans[0])
    parts = dict.fromkeys(_PARTS.values(), 0.0)
    for name, part in _PARTS.items():
        parts[part] += found.get(name, 0.0)
    if world > 1:
        between = (
            _BETWEEN if len(taken.spans) > 1 else _BETWEEN[1:]
        )  # one device's rounds wait for nobody
        parts["sync"] += sum(found.get(name, 0.0) for name in between)
    idle = seconds_between(before, taken.begin)
    devices = (
        tuple(
            sum(seconds_by_phase(spans).get(name, 0.0) for name in ("forward", "backward"))
            for spans in taken.spans
        )
        if len(taken.spans) > 1
        else ()
    )
    return Step(
        seconds_between(before, taken.end),
        taken.samples,
        {"data": min(taken.wait, idle), **parts},
        devices,
    )


def _operations(averages: Any, device: str, steps: int) -> tuple[Operation, ...]:
    """By their own time: on a GPU what its kernels took, on a CPU what the thread did that called
    them.
    """
    found = []
    for one in averages:
        own = (
            (one.self_device_time_total if device == "cuda" else one.self_cpu_time_total)
            / 1e6
            / steps
        )
        called = (
            one.device_type == DeviceType.CPU
        )  # kernels have lines of their own, with the times of those who called them
        if (
            own > 0
            and called
            and not one.is_user_annotation
            and not one.key.startswith("ProfilerStep")
        ):
            found.append(
                Operation(
                    one.key.replace(_ENGINE, "autograd: "),
                    _shapes(one.input_shapes),
                    one.count / steps,
                    own,
                    one.key.startswith(_COLLECTIVE),
                )
            )
    return tuple(found)


def _shapes(shapes: Any) -> str:
    return (
        " ".join(
            "x".join(map(str, shape))
            for shape in shapes
            if shape and not isinstance(shape[0], list)
        )
        if shapes
        else ""
    )


def _held(state: State) -> dict[str, int]:
    """What this process has of a training state, on the device of its first weights."""

    def size(tensors: Iterator[Any]) -> int:
        parts = [local_view(tensor.detach()) for tensor in tensors if tensor is not None]
        return sum({part.data_ptr() or id(part): part.nbytes for part in parts}.values())

    slots = (
        tensor
        for weight in state.trained
        for tensor in state.optimizer.state_of(weight).values()
        if tensor.ndim
    )
    return {
        "weights": size(iter(state.model.parameters())),
        "gradients": size(parameter.grad for parameter in state.model.parameters()),
        "optimizer": size(slots),
    }


class _ActivationMemory:
    """What autograd keeps for backward of one slot, by storage, without weights: counted as it is
    kept.
    """

    def __init__(self, lanes: int) -> None:
        self._storages: list[dict[int, int]] = [{} for _ in range(lanes)]
        self._most = [0] * lanes
        self._inside: list[str] = []
        self.by_module: dict[str, int] = {}

    def most(self) -> int:
        return max(self._most)

    def complete(self, recompute: str) -> bool:
        """Whether that is all: what is computed again keeps its inputs elsewhere."""
        return recompute == "none" and any(self._most)

    @contextmanager
    def watching(self, model: nn.Module, marks: TimedTimeline, compiled: bool) -> Iterator[None]:
        """compiled: its blocks are, so what they keep is told as a block's, not as that of its
        parts.
        """
        inside = (
            {
                id(module)
                for block in repeated_blocks(model) or [model]
                for module in block.modules()
                if module is not block
            }
            if compiled
            else set()
        )
        seen = [
            (name, module) for name, module in model.named_modules() if id(module) not in inside
        ]
        hooks = [
            hook
            for name, module in seen
            for hook in (
                module.register_forward_pre_hook(self._enters(name)),
                module.register_forward_hook(self._leaves, always_call=True),
            )
        ]
        marks.around = self._around
        try:
            yield
        finally:
            marks.around = lambda name, lane: nullcontext()
            for hook in hooks:
                hook.remove()

    def _enters(self, name: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(name)

    def _leaves(self, *_: Any) -> None:
        self._inside.pop()

    def _around(self, name: str, lane: int) -> AbstractContextManager[Any]:
        return self._forward(lane) if name == "forward" else nullcontext()

    @contextmanager
    def _forward(self, lane: int) -> Iterator[None]:
        storages = self._storages[lane]
        storages.clear()
        if lane == 0:
            self.by_module.clear()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            owner = tensor if tensor._base is None else tensor._base
            place = tensor.untyped_storage().data_ptr()
            if not (owner.is_leaf and owner.requires_grad) and place not in storages:
                storages[place] = tensor.untyped_storage().nbytes()
                if lane == 0:
                    inside = self._inside[-1] if self._inside else ""
                    self.by_module[inside] = self.by_module.get(inside, 0) + storages[place]
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        self._most[lane] = max(self._most[lane], sum(storages.values()))
