"""Gloo with CUDA tensors, as torch's CUDA builds have it: every value passes through the host.

A CPU build of torch has Gloo's broadcast, reduce, gather, scatter, all_gather, all_to_all of CUDA
tensors, but not its all_reduce. `install` adds it, and the reduce_scatter that is made of it.
Gloo cannot coalesce CUDA tensors, nor send and receive them: on GPUs it fails there too.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from samecurve_products.rehearse.emulated_cuda.cpp_process_group import cpp


class Staged:
    """A collective on pinned copies of CUDA tensors, which are copied back at its end."""

    def __init__(
        self, work: Any, copy_back: Callable[[], None], results: Sequence[torch.Tensor]
    ) -> None:
        """copy_back: queues the copies on the current stream."""
        self._work, self._copy_back, self._results = work, copy_back, list(results)
        self._device = results[0].device
        self._stream = torch.cuda.Stream(self._device)
        self._end: torch.cuda.Event | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait on the host for the sums, and order the current stream after their copy."""
        self._finish(timeout)
        assert self._end is not None
        torch.cuda.current_stream(self._device).wait_event(self._end)
        return True

    def _finish(self, timeout: timedelta | None = None) -> None:
        if self._end is None:
            self._work.wait(timeout or timedelta(0))
            with torch.cuda.stream(self._stream):
                self._copy_back()
                self._end = self._stream.record_event()

    def is_completed(self) -> bool:
        completed: bool = self._work.is_completed()
        return completed

    def is_success(self) -> bool:
        succeeded: bool = self._work.is_completed() and self._work.is_success()
        return succeeded

    def failure(self) -> str:
        error = self._work.exception() if self._work.is_completed() else None
        return "" if error is None else str(error)

    def abort(self) -> bool:
        raise RuntimeError("Gloo cannot abort a collective")

    def result(self) -> list[torch.Tensor]:
        return self._results

    def sequence_number(self) -> int:
        return 0

    def duration(self) -> float:
        return 0.0

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The sums, ordered on the stream that copies them back. The host waits for them."""
        self._finish()
        future: torch.futures.Future[list[torch.Tensor]]
        future = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._results)
        return future


class GlooOnCuda(cpp.PythonBackend):
    """What a Gloo group does with CUDA tensors."""

    def __init__(self, gloo: c10d.ProcessGroupGloo) -> None:
        super().__init__(gloo.rank(), gloo.size(), "gloo")
        self.gloo = gloo
        self.options = gloo.options

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Staged:
        opts = opts or dist.AllreduceOptions()
        copies = [_pinned_copy(tensor) for tensor in tensors]
        for tensor in tensors:  # Gloo waits for the copies in its own thread
            torch.cuda.current_stream(tensor.device).synchronize()
        work = self.gloo.allreduce(copies, opts)

        def copy_back() -> None:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy, non_blocking=True)

        return Staged(work, copy_back, tensors)

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Staged:
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Staged:
        [output], [parts] = outputs, inputs
        whole = torch.stack(parts).view(len(parts) * output.shape[0], *output.shape[1:])
        return self.reduce_scatter_tensor_coalesced([output], [whole], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Staged:
        sums = dist.AllreduceOptions()
        sums.reduceOp = (opts or dist.ReduceScatterOptions()).reduceOp
        wholes = [tensor.clone() for tensor in inputs]
        works = [self.allreduce([whole], sums) for whole in wholes]

        def copy_back() -> None:
            for work, whole, output in zip(works, wholes, outputs, strict=True):
                work.wait()
                output.copy_(whole.chunk(self.size())[self.rank()].view(output.shape))

        return Staged(works[-1], copy_back, outputs)

    def allreduce_coalesced(self, _tensors: list[torch.Tensor], _opts: Any = None) -> None:
        raise _refused("allreduce_coalesced")

    def allgather_into_tensor_coalesced(self, *_arguments: Any) -> None:
        raise _refused("allgather_into_tensor_coalesced")

    def send(self, *_arguments: Any) -> None:
        raise _refused("send")

    def recv(self, *_arguments: Any) -> None:
        raise _refused("recv")

    def sequence_number(self) -> int:
        number: int = self.gloo._get_sequence_number_for_group()
        return number

    def abort(self) -> None:
        self.gloo.abort()

    def shutdown(self) -> None:
        """Let go of a group that its ProcessGroup ends."""
        _alive.remove(self)


def _passed_on(name: str) -> Callable[..., Any]:
    """A method that torch's own Gloo has for CUDA tensors in a CPU build too."""

    def method(self: GlooOnCuda, *arguments: Any) -> Any:
        return getattr(self.gloo, name)(*arguments)

    return method


for _name in (
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "gather",
    "scatter",
    "alltoall_base",
    "alltoall",
    "barrier",
):
    setattr(GlooOnCuda, _name, _passed_on(_name))

_alive: list[GlooOnCuda] = []  # Python must hold what otherwise only C++ refers to


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _refused(name: str) -> RuntimeError:
    return RuntimeError(f"ProcessGroupGloo::{name}: unsupported device type cuda")


def install() -> None:
    """Have every Gloo group take CUDA tensors, beside the tensors of CPUs."""
    register = dist.ProcessGroup._register_backend

    def register_backend(
        self: dist.ProcessGroup, device: torch.device, kind: Any, backend: Any = None
    ) -> None:
        if device.type == "cuda" and isinstance(backend, c10d.ProcessGroupGloo):
            backend = GlooOnCuda(backend)
            _alive.append(backend)
            kind = dist.ProcessGroup.BackendType.CUSTOM  # a group has one backend of each kind
        register(self, device, kind, backend)

    dist.ProcessGroup._register_backend = register_backend
