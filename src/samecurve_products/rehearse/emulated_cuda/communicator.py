"""A communicator of the emulated NCCL: its thread, its stream, and the collectives it still owes.

A collective runs on the communicator's thread, in the order of calls, so that the host goes on as
beside a GPU. Kernels run at once on the host's thread. So the host waits for the communicator's
thread wherever a stream would wait for the collective: in wait(), and in a device's synchronize.
What nobody waits for is a race, which the clocks of streams report.
"""

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any

import emulated_cuda_native as native
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from samecurve_products.rehearse.emulated_cuda.exchange import Exchange, MismatchError

_GRACE = 5.0  # seconds; a GPU would have run the collectives of a healthy group long since

Sizes = dict[int, list[int]]  # the elements of each message, by peer


@dataclass
class Call:
    """One collective as a rank has called it."""

    operation: str  # as torch's watchdog names it: ALLREDUCE
    title: str  # as torch's flight recorder names it: nccl:all_reduce
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    run: Callable[[Exchange], None]  # works on the host's view of the tensors
    agreed: str  # what all ranks must call alike: sizes, type, root
    sends: Sizes | None = None  # None: the call is for all peers, and `agreed` says its sizes
    receives: Sizes | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the call once."""
        return list({id(tensor): tensor for tensor in [*self.inputs, *self.outputs]}.values())


@dataclass
class Message:
    """What one rank sends another, or gets from it."""

    tensor: torch.Tensor
    view: torch.Tensor  # of the tensor, on the host
    peer: int
    sends: bool


def joined(messages: Sequence[Message], rank: int) -> Call:
    """Messages that pass at the same time, as one call of rank `rank`."""
    sent = [message for message in messages if message.sends]
    received = [message for message in messages if not message.sends]
    first = messages[0]
    operation, arrow = ("SEND", "->") if first.sends else ("RECV", "<-")
    title = f"nccl:{operation.lower()} {rank}{arrow}{first.peer}"
    return Call(
        operation if len(messages) == 1 else "COALESCED",
        title if len(messages) == 1 else "nccl:coalesced",
        [message.tensor for message in sent],
        [message.tensor for message in received],
        lambda exchange: exchange.swap(
            [(message.peer, message.view) for message in sent],
            [(message.peer, message.view) for message in received],
        ),
        "messages",
        _sizes(sent),
        _sizes(received),
    )


def _sizes(messages: Sequence[Message]) -> Sizes:
    sizes: Sizes = {}
    for message in messages:
        sizes.setdefault(message.peer, []).append(message.view.numel() * message.view.itemsize)
    return sizes


class Pending:
    """A collective from its call to its end: what torch's Work asks."""

    def __init__(
        self,
        communicator: "Communicator",
        calls: Sequence[Call],
        end: torch.cuda.Event | None,
        number: int,
        timeout: timedelta,
        *,
        before: str = "",
    ) -> None:
        """end: None where the collective runs on the caller's stream.

        before: the collectives that this process had begun in other groups; peers must agree.
        """
        self.communicator, self.calls, self.number = communicator, calls, number
        self.timeout = timeout
        self.started, self.ended_at = time.time(), 0.0
        self.error: Exception | None = None
        self.is_barrier = False
        self.before = before
        self.place = native.here()  # the Python lines of the call
        self.elements = tuple(
            sum(tensor.numel() for call in calls for tensor in side(call))
            for side in (attrgetter("inputs"), attrgetter("outputs"))
        )
        self._end = end
        self.done = threading.Event()  # set at the end, whatever it is
        # The memory stays until somebody has waited. torch keeps it so.
        self._kept: list[torch.Tensor] = [tensor for call in calls for tensor in call.tensors]
        self._outputs = [tensor for call in calls for tensor in call.outputs]

    @property
    def call(self) -> Call:
        """The first call, by which a batch is named."""
        return self.calls[0]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the collective. Returns False after an abort."""
        limit = timeout.total_seconds() if timeout else None
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1":
            limit = limit or self.timeout.total_seconds()
        if not self.done.wait(limit):
            raise self.communicator.timed_out(self)
        if self.error is not None:
            if isinstance(self.error, AbortedError):
                return False
            raise self.error
        if self._end is not None:
            stream = torch.cuda.current_stream(self.communicator.device)
            stream.wait_event(self._end)
        if self.is_barrier:
            torch.cuda.current_stream(self.communicator.device).synchronize()
        self._kept.clear()
        return True

    def wait_for_end(self, seconds: float | None) -> bool:
        """Have the host wait for the end. Returns whether it has come."""
        return self.done.wait(seconds)

    def is_completed(self) -> bool:
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.done.is_set() and self.error is None

    def failure(self) -> str:
        """The error in words; '' if there is none."""
        return "" if self.error is None else str(self.error)

    def abort(self) -> bool:
        self.communicator.abort()
        return True

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def sequence_number(self) -> int:
        return self.number

    def duration(self) -> float:
        """Milliseconds that the collective took."""
        return (self.ended_at - self.started) * 1000

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The result, ordered on the communicator's stream. The host waits for the thread."""
        self.done.wait()
        device = self.communicator.device
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device])
        if self.error is not None:
            future.set_exception(self.error)
            return future
        stream = self.communicator.stream if self._end is not None else None
        with torch.cuda.stream(stream):
            future.set_result(self._outputs)
        return future

    def get_future_result(self) -> torch.futures.Future[int]:
        """0 for success, as torch counts c10d::WorkResult."""
        self.done.wait()
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(0 if self.error is None else 2)
        return future

    def finish(self, error: Exception | None = None) -> None:
        """End the collective, once."""
        if self.done.is_set():
            return
        self.error, self.ended_at = error, time.time()
        for call in self.calls:
            call.inputs = call.outputs = ()
            call.run = _nothing
        self.done.set()

    def __del__(self) -> None:
        """Keep memory that nobody waited for until the communicator's stream is done with it."""
        if self._end is not None and not sys.is_finalizing():
            for tensor in self._kept:
                tensor.record_stream(self.communicator.stream)


class AbortedError(Exception):
    """The communicator was aborted while the collective ran."""


class Communicator:
    """Runs the collectives of one group, or of one pair of its ranks, in the order of calls."""

    def __init__(
        self,
        device: torch.device,
        connect: Callable[[], Exchange],
        timed_out: Callable[[Pending], Exception],
        name: str,
    ) -> None:
        """connect: meets the other ranks; called on the thread, when the first collective comes.

        timed_out: makes the exception of a wait that was given a limit.
        name: of the thread.
        """
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.timed_out = timed_out
        self.hangs = False
        self.open: list[Pending] = []  # in the order of calls; the first one runs
        self._connect = connect
        self._exchange: Exchange | None = None
        self._refused: Exception | None = None  # why this communicator can't be made
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._end_of_hang = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, pending: Pending) -> None:
        """Have the thread run a collective."""
        self.open.append(pending)
        self._queue.put(pending)

    def connect_now(self) -> None:
        """Meet the other ranks before the first collective."""
        call = Call("INIT", "nccl:init", (), (), _nothing, "", sends={})
        pending = Pending(self, [call], None, 0, timedelta(days=1))
        self.submit(pending)
        pending.wait()

    def close(self) -> None:
        """End the thread after what it has been given, or end that as failed after some seconds."""
        last = time.monotonic() + _GRACE
        while self.open and not self.hangs and time.monotonic() < last:
            self.open[0].wait_for_end(0.05)
        ended = not self.open
        self.abort()
        if ended:
            self._thread.join()
            # Gloo ends on this thread: a daemon thread may not come back when the interpreter ends
            self._exchange = None

    def abort(self) -> None:
        """End all collectives that are open, as failed. Their thread goes once Gloo lets it."""
        self._end_of_hang.set()
        for pending in list(self.open):
            pending.finish(AbortedError("NCCL communicator was aborted."))
        self.open.clear()
        self._queue.put(None)

    def _work(self) -> None:
        while (pending := self._queue.get()) is not None:
            error: Exception | None = None
            try:
                self._run(pending)
            except dist.DistBackendError as failure:
                error = self._refused = failure
            except (MismatchError, RuntimeError) as reason:  # RuntimeError: Gloo has lost a peer
                self._hang(pending, reason)
                return
            except Exception as failure:
                error = failure
            with suppress(ValueError):  # aborted meanwhile
                self.open.remove(pending)
            pending.finish(error)
            del pending  # and its memory, while the queue is empty

    def _run(self, pending: Pending) -> None:
        if self._refused is not None:
            raise self._refused
        if self._exchange is None:
            self._exchange = self._connect()
        for call in pending.calls:
            self._agree(call, pending)
            call.run(self._exchange)

    def _agree(self, call: Call, pending: Pending) -> None:
        assert self._exchange is not None
        everyone: Sizes = {peer: [] for peer in self._exchange.peers}
        is_everyones = call.sends is None and call.receives is None
        sends = everyone if is_everyones else call.sends or {}
        receives = everyone if is_everyones else call.receives or {}
        notes = self._exchange.agree(call.agreed, sends, receives, pending.before)
        for peer, before in notes.items():
            report_order(pending, peer, before)

    def _hang(self, pending: Pending, reason: Exception) -> None:
        """Never end, as NCCL's kernels where ranks disagree or a rank is gone."""
        if pending not in self.open:  # aborted meanwhile
            return
        self.hangs = True
        report_hang(pending, reason)
        if os.environ.get("EMULATED_CUDA_LOUD"):
            print(f"emulated NCCL: {pending.call.title} hangs: {reason}", file=sys.stderr)
        self._end_of_hang.wait()


def _nothing(_exchange: Exchange) -> None:
    pass


def report_hang(pending: Pending, reason: Exception) -> None:
    """Report a collective that never ends, at the line of its call."""
    title = pending.call.title.removeprefix("nccl:")
    if isinstance(reason, MismatchError):
        text = f"{title} never ends: {reason}; all ranks must call the same, in the same order"
        native.found("collective", text, pending.place)
    else:
        text = f"{title} never ends: another rank has ended, or has left the group, without it"
        native.found("hang", text, pending.place)


def report_order(pending: Pending, peer: int, before: str) -> None:
    """Report groups whose collectives a peer has begun in another order than this rank.

    before: what the peer had begun in other groups, as Pending.before has it
    """
    own, theirs = (_begun(text) for text in (pending.before, before))
    differing = [name for name in own.keys() & theirs.keys() if own[name] != theirs[name]]
    if differing:
        title = pending.call.title.removeprefix("nccl:")
        native.found(
            "collective",
            f"{title} comes after {own[differing[0]]} collectives of another group on this rank,"
            f" and after {theirs[differing[0]]} on rank {peer}; ranks that have two groups in"
            " common must call them in one order, or they may wait for each other for ever",
            pending.place,
        )


def _begun(text: str) -> dict[str, str]:
    """Counts by the name of a group."""
    return dict(part.rsplit("=", 1) for part in text.split())


def connected(
    store: c10d.Store, rank: int, members: Sequence[int], device: torch.device
) -> Exchange:
    """Meet the other members. DistBackendError, as NCCL has it: two of them use one GPU."""
    exchange = Exchange(store, rank, members)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    properties: Any = torch.cuda.get_device_properties(device)
    own = f"{socket.gethostname()} {visible} {properties.uuid}"
    store.set(f"gpu {rank}", own)
    for other in members:
        if other != rank and store.get(f"gpu {other}").decode() == own:
            raise dist.DistBackendError(
                "NCCL error in: ProcessGroupNCCL.cpp, invalid usage (run with NCCL_DEBUG=WARN for"
                " details)\nncclInvalidUsage: This usually reflects invalid usage of NCCL library."
                f"\nLast error:\nDuplicate GPU detected : rank {rank} and rank {other} both on CUDA"
                f" device {properties.pci_bus_id:x}000"
            )
    return exchange
