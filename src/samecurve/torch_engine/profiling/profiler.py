"""The profile of a TorchEngine's steps.

Some steps are timed by the clock alone, some run under torch's profiler, and in the last one the
tensors are counted that are kept for backward.
"""

import gzip
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType

# not public, although torch.profiler.profile takes it as an argument
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from samecurve.core.measurement.profile_types import Operation, ProfileSchedule, RankProfile, Step
from samecurve.core.protocols import Batch, PendingMetrics, Round
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.model.model_setup import repeated_blocks
from samecurve.torch_engine.optimizers import local_view
from samecurve.torch_engine.profiling.timeline import (
    Moment,
    Span,
    Timeline,
    seconds_between,
    seconds_by_part,
)
from samecurve.torch_engine.step import State
from samecurve.torch_engine.step.step_metrics import peak_memory_bytes

# parts of a step as timeline.py names them -> what a profile calls them
_PARTS = {
    "forward": "forward",
    "backward": "backward",
    "sync": "sync",
    "clip": "optimizer",
    "optimizer": "optimizer",
}
# parts in which several devices pass values on, or wait for each other
_SYNC_PARTS = ("rounds", "reduce", "replicas")
_COLLECTIVE = ("nccl", "gloo:", "c10d::")
_AUTOGRAD_PREFIX = "autograd::engine::evaluate_function: "


@dataclass(frozen=True)
class _TimedStep:
    """The times of a step, on the first device's clock."""

    wait_seconds: float
    samples: int
    begin: Moment
    end: Moment
    spans: list[list[Span]]  # by device


class TorchWatch:
    """Watches the steps of an engine, as the schedule says.

    trace: where the profiler's trace goes; None: no trace is written
    """

    def __init__(self, engine: TorchEngine, course: ProfileSchedule, trace: Path | None) -> None:
        self._engine, self._schedule, self._trace_path = engine, course, trace
        self._timeline = Timeline(engine.devices)
        engine.comm.timeline = self._timeline
        self._timed_steps: list[_TimedStep] = []
        self._profiler: profile | None = None
        self._activations = _ActivationMemory(len(engine.devices))
        self._first_seconds = self._traced_seconds = 0.0
        self._operations: tuple[Operation, ...] = ()
        self._memory: dict[str, int] = {}
        self._peaks: tuple[int, ...] = ()

    def step(
        self, state: State, batch: Batch[list[Round]], lr: float, requests: Sequence[int]
    ) -> tuple[State, PendingMetrics]:
        number, schedule = batch.step, self._schedule
        began = time.perf_counter()
        if number == schedule.tracer < schedule.last:
            self._begin_trace()
        watching: AbstractContextManager[object] = nullcontext()
        if number == schedule.last:
            compiled = self._engine.plan.compiles_blocks
            watching = self._activations.watching(state.model, self._timeline, compiled=compiled)
        with watching, self._timeline.timing_waits():
            begin = self._timeline.now()
            result = self._engine.step(state, batch, lr, requests)
            end, spans = self._timeline.now(), self._timeline.take_spans()
        timed = _TimedStep(batch.wait_seconds, batch.samples, begin, end, spans)
        self._timed_steps.append(timed)
        if number == 0:
            self._drain()
            self._first_seconds = time.perf_counter() - began
        if number == schedule.tracer - 1:  # before the profiler's own memory adds to the peaks
            self._peaks = tuple(map(peak_memory_bytes, self._engine.devices))
        if schedule.tracer <= number < schedule.last:
            self._next_traced(number)
        if number == schedule.last:
            self._memory = _held_bytes(state)
            most = self._activations.most()
            if most and not self._engine.plan.reruns_blocks:  # else inputs lie elsewhere
                self._memory["activations"] = most
        return result

    def rank_profile(self) -> RankProfile:
        self._drain()
        schedule, timed = self._schedule, self._timed_steps
        layout = self._engine.plan.layout
        several = layout.num_devices > layout.world_size  # in this process
        steps = [
            _step(before.end, step, layout.num_devices, several=several)
            for before, step in zip(
                timed[schedule.warm - 1 :], timed[schedule.warm : schedule.tracer], strict=False
            )
        ]
        activations = self._activations.by_module if "activations" in self._memory else {}
        return RankProfile(
            rank=self._engine.comm.rank,
            steps=tuple(steps),
            traced=self._traced_seconds,
            operations=self._operations,
            memory=self._memory,
            peaks=self._peaks,
            first=self._first_seconds,
            kept=activations,
            trace=str(self._trace_path) if self._trace_path else None,
        )

    def _drain(self) -> None:
        for device in self._engine.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _begin_trace(self) -> None:
        self._drain()
        gpu = [ProfilerActivity.CUDA] if self._engine.device.type == "cuda" else []
        self._timeline.around = lambda name, _device: record_function(f"samecurve/{name}")
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *gpu],
            schedule=schedule(wait=0, warmup=1, active=self._schedule.traced, repeat=1),
            record_shapes=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # dp's threads, too
        )
        self._profiler.start()

    def _next_traced(self, number: int) -> None:
        assert self._profiler is not None
        if number == self._schedule.tracer:
            self._drain()
            self._traced_seconds = time.perf_counter()
        elif number == self._schedule.last - 1:
            self._drain()
            elapsed = time.perf_counter() - self._traced_seconds
            self._traced_seconds = elapsed / self._schedule.traced
            self._end_trace(self._profiler)
            return
        self._profiler.step()

    def _end_trace(self, profiler: profile) -> None:
        self._timeline.around = None
        profiler.stop()
        if self._trace_path:
            _export(profiler, self._trace_path)
        self._operations = _operations(
            profiler.key_averages(group_by_input_shape=True),
            self._engine.device.type,
            self._schedule.traced,
        )
        self._profiler = None


def _export(profiler: profile, path: Path) -> None:
    """Write the trace, compressed. Given such a path, torch makes a copy in TMPDIR, and a kill
    leaves the copy there.
    """
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with open(plain, "rb") as source, gzip.open(path, "wb") as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


def _step(before: Moment, step: _TimedStep, num_devices: int, *, several: bool) -> Step:
    """A step as a profile shows it.

    before: when the step before ended
    several: whether this process has several devices, each with spans of its own
    """
    first = seconds_by_part(step.spans[0])
    parts = dict.fromkeys(_PARTS.values(), 0.0)
    for name, part in _PARTS.items():
        parts[part] += first.get(name, 0.0)
    if num_devices > 1:
        # with one device in this process, no round waits for another device
        names = _SYNC_PARTS if several else _SYNC_PARTS[1:]
        parts["sync"] += sum(first.get(name, 0.0) for name in names)
    idle = seconds_between(before, step.begin)
    parts = {"data": min(step.wait_seconds, idle), **parts}
    devices = tuple(map(_computing_seconds, step.spans)) if several else ()
    return Step(seconds_between(before, step.end), step.samples, parts, devices)


def _computing_seconds(spans: list[Span]) -> float:
    seconds = seconds_by_part(spans)
    return sum(seconds.get(name, 0.0) for name in ("forward", "backward"))


def _operations(averages: Iterable[Any], device: str, steps: int) -> tuple[Operation, ...]:
    """The operations with their own time: on a GPU the time of their kernels, on a CPU the time of
    the thread that called them.
    """
    operations = []
    for average in averages:
        if device == "cuda":
            microseconds = average.self_device_time_total
        else:
            microseconds = average.self_cpu_time_total
        seconds = microseconds / 1e6 / steps
        # kernels have lines of their own, which repeat the times of the operations that called them
        is_call = average.device_type == DeviceType.CPU
        is_mark = average.is_user_annotation or average.key.startswith("ProfilerStep")
        if seconds > 0 and is_call and not is_mark:
            operations.append(
                Operation(
                    average.key.replace(_AUTOGRAD_PREFIX, "autograd: "),
                    _shapes_text(average.input_shapes),
                    average.count / steps,
                    seconds,
                    average.key.startswith(_COLLECTIVE),
                )
            )
    return tuple(operations)


def _shapes_text(shapes: Any) -> str:
    """The shapes of an operation's arguments as text: 8x16 16x32.

    shapes: one for each argument, a list of shapes for a list of tensors; or None
    """
    plain = [shape for shape in shapes or [] if shape and not isinstance(shape[0], list)]
    return " ".join("x".join(map(str, shape)) for shape in plain)


def _held_bytes(state: State) -> dict[str, int]:
    """The bytes of weights, gradients and optimizer state that this process holds."""

    def size(tensors: Iterable[torch.Tensor | None]) -> int:
        locals_ = [local_view(tensor.detach()) for tensor in tensors if tensor is not None]
        return sum({one.data_ptr() or id(one): one.nbytes for one in locals_}.values())

    optimizer_state = (
        tensor
        for param in state.trained
        for tensor in state.optimizer.state_of(param).values()
        if tensor.ndim
    )
    return {
        "weights": size(state.model.parameters()),
        "gradients": size(parameter.grad for parameter in state.model.parameters()),
        "optimizer": size(optimizer_state),
    }


class _ActivationMemory:
    """Counts the bytes that autograd keeps for the backward pass of one microbatch, by storage and
    without weights, at the moment when they are kept.
    """

    def __init__(self, num_devices: int) -> None:
        self._storages: list[dict[int, int]] = [{} for _ in range(num_devices)]
        self._most = [0] * num_devices
        self._running_modules: list[str] = []
        self.by_module: dict[str, int] = {}

    def most(self) -> int:
        return max(self._most)

    @contextmanager
    def watching(self, model: nn.Module, timeline: Timeline, *, compiled: bool) -> Iterator[None]:
        """Count while the block runs.

        compiled: whether the model's blocks are; bytes then count for a block, not for its parts
        """
        hidden = set()
        if compiled:
            blocks = repeated_blocks(model) or [model]
            parts = ((block, module) for block in blocks for module in block.modules())
            hidden = {id(module) for block, module in parts if module is not block}
        hooks = []
        for name, module in model.named_modules():
            if id(module) not in hidden:
                hooks.append(module.register_forward_pre_hook(self._entering(name)))
                hooks.append(module.register_forward_hook(self._leave, always_call=True))
        timeline.around = self._around
        try:
            yield
        finally:
            timeline.around = None
            for hook in hooks:
                hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._running_modules.append(name)

    def _leave(self, *_: object) -> None:
        self._running_modules.pop()

    def _around(self, name: str, device: int) -> AbstractContextManager[object]:
        return self._counting(device) if name == "forward" else nullcontext()

    @contextmanager
    def _counting(self, device: int) -> Iterator[None]:
        storages = self._storages[device]
        storages.clear()
        if device == 0:
            self.by_module.clear()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            owner = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - of views
            address = tensor.untyped_storage().data_ptr()
            if not (owner.is_leaf and owner.requires_grad) and address not in storages:
                storages[address] = tensor.untyped_storage().nbytes()
                if device == 0:
                    name = self._running_modules[-1] if self._running_modules else ""
                    self.by_module[name] = self.by_module.get(name, 0) + storages[address]
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
        self._most[device] = max(self._most[device], sum(storages.values()))
