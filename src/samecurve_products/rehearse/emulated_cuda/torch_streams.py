"""torch.cuda's streams and events, on torch's streams of any accelerator."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import emulated_cuda_native as native
import torch

from samecurve_products.rehearse.emulated_cuda.presence import tell_memory
from samecurve_products.rehearse.emulated_cuda.visible import visible_gpus

_ADDRESS = 1 << 40  # where those of streams begin


@cache
def seen_gpus() -> tuple[int, ...]:
    """The machine's number of cuda:0, cuda:1, ...: the driver reads the environment once."""
    gpus = visible_gpus(os.environ)
    native.show_devices(len(gpus))
    return gpus


def initialize() -> None:
    """What torch.cuda.init does: run what was asked for before, such as a seed."""
    if torch.cuda._initialized:
        return
    if not seen_gpus():
        raise RuntimeError(f"No {'HIP' if torch.version.hip else 'CUDA'} GPUs are available")
    torch.cuda._initialized = True
    cuda: Any = torch.cuda
    cuda.default_generators = tuple(native.generator(i) for i in range(native.device_count()))
    tell_memory(seen_gpus(), lambda device: int(native.memory(device)[0]))
    for queued, _ in torch.cuda._queued_calls:
        if queued.__name__ not in {"_check_capability", "_check_cubins"}:
            queued()


def index_of(device: Any) -> int:
    """The index of a device given as torch.cuda's functions take it; the current one for None."""
    if device is None:
        return int(native.get_device())
    if isinstance(device, int):
        index = device
    else:
        found = torch.device(device)
        if found.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {found}")
        index = -1 if found.index is None else found.index
    if index >= len(seen_gpus()):
        raise AssertionError("Invalid device id")
    return index if index >= 0 else int(native.get_device())


class Event(torch.Event):
    """torch.cuda.Event."""

    is_timed: bool
    at: float

    def __new__(
        cls,
        enable_timing: bool = False,  # noqa: FBT001, FBT002
        blocking: bool = False,  # noqa: ARG004, FBT001, FBT002
        interprocess: bool = False,  # noqa: ARG004, FBT001, FBT002
        external: bool = False,  # noqa: ARG004, FBT001, FBT002
    ) -> "Event":
        device = torch.device("cuda", native.get_device())
        made = super().__new__(cls, device=device, enable_timing=enable_timing)
        made.is_timed = enable_timing
        return made

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.is_timed and end_event.is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return float((end_event.at - self.at) * 1e3)


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **parts: Any) -> "Stream":
        if parts:
            return super().__new__(cls, **parts)
        return super().__new__(cls, torch.device("cuda", index_of(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return raw(int(self.stream_id))

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class ExternalStream(Stream):
    """torch.cuda.ExternalStream: a stream by its address."""

    def __new__(cls, stream_ptr: int, device: Any = None, **_: Any) -> Stream:
        index = index_of(device)
        return Stream(
            stream_id=stream_ptr % _ADDRESS,
            device_index=index,
            device_type=current_stream(index).device_type,
        )


def raw(stream_id: int) -> int:
    """The address of a stream. CUDA gives 0, 1 and 2 meanings of their own."""
    return _ADDRESS + stream_id if stream_id else 0


def current_stream(device: Any = None) -> Stream:
    initialize()
    current = torch.accelerator.current_stream(index_of(device))
    return Stream(
        stream_id=current.stream_id,
        device_index=current.device_index,
        device_type=current.device_type,
    )


def default_stream(device: Any = None) -> Stream:
    kind = current_stream(device).device_type
    return Stream(stream_id=0, device_index=index_of(device), device_type=kind)


@contextmanager
def stream(chosen: Any) -> Iterator[Any]:
    """Make a stream the current one of its device, and its device the current one."""
    if chosen is None:
        yield None
        return
    device_before = native.exchange_device(chosen.device_index)
    before = torch.accelerator.current_stream(chosen.device_index)
    torch.accelerator.set_stream(chosen)
    try:
        yield chosen
    finally:
        torch.accelerator.set_stream(before)
        native.set_device(device_before)


def set_stream(chosen: Any) -> None:
    if chosen is not None:
        torch.accelerator.set_stream(chosen)


def stream_data(device: int) -> tuple[int, int, int]:
    """A current stream in the form of torch._C._cuda_getCurrentStream."""
    current = torch.accelerator.current_stream(device)
    return current.stream_id, current.device_index, current.device_type


def install() -> None:
    cuda: Any = torch.cuda
    core: Any = torch._C
    core._cuda_getCurrentStream = stream_data
    core._cuda_getDefaultStream = lambda device: (0, device, stream_data(device)[2])
    core._cuda_getCurrentRawStream = lambda device: raw(stream_data(device)[0])
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.ExternalStream = cuda.streams.ExternalStream = ExternalStream
    cuda.Event = cuda.streams.Event = Event
    cuda.current_stream, cuda.default_stream = current_stream, default_stream
    cuda.stream, cuda.set_stream = stream, set_stream
