"""The state of one NCCL group: its communicators, its open batch, its sequence of collectives.

nccl.py derives ProcessGroupNCCL from it, which has the operations.
"""

from collections import Counter
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import emulated_cuda_native as native
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from samecurve_products.rehearse.emulated_cuda import nccl_watch
from samecurve_products.rehearse.emulated_cuda.communicator import (
    Call,
    Communicator,
    Message,
    Pending,
    connected,
    joined,
)
from samecurve_products.rehearse.emulated_cuda.cpp_process_group import cpp

counted: Counter[tuple[str, str, str]] = Counter()  # calls by (group, operation, type)
counted_bytes: Counter[tuple[str, str, str]] = Counter()
_uids = count()


class NcclOptions(cpp.Options):
    """NcclGroup.Options. Settings of the real NCCL are kept and have no effect."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:  # noqa: FBT001, FBT002 - as torch
        super().__init__()
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        self.split_from: NcclGroup | None = None
        self.split_color = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "NcclOptions":
        copied = NcclOptions(self.is_high_priority_stream)
        copied.timeout, copied.group_name = self.timeout, self.group_name
        copied.global_ranks_in_group = self.global_ranks_in_group
        copied.config = SimpleNamespace(**vars(self.config))
        return copied


class NcclGroup(cpp.PythonBackend):
    """Queues what NcclGroup's operations make, and ends it."""

    Options = NcclOptions

    def __init__(
        self, store: c10d.Store, rank: int, size: int, options: NcclOptions | None = None
    ) -> None:
        super().__init__(rank, size, "nccl")
        self.options = options if options is not None else NcclOptions()
        self.uid = next(_uids)
        self._store = store
        self._communicators: dict[tuple[tuple[int, ...], torch.device], Communicator] = {}
        self._batch: list[Call | Message] | None = (
            None  # between start_coalescing and end_coalescing
        )
        self._sequence = {False: 0, True: 0}  # collectives so far; messages between two ranks
        self._splits = 0
        self._why_aborted = ""
        self.bound_device_id: torch.device | None = None
        nccl_watch.add(self)

    # What torch asks of the group besides.

    def start_coalescing(self) -> None:
        self._batch = []

    def end_coalescing(self) -> Pending | None:
        batch, self._batch = self._batch or [], None
        if not batch:
            return None
        messages = [part for part in batch if isinstance(part, Message)]
        calls = [part for part in batch if isinstance(part, Call)]
        return self._submit([*calls, joined(messages, self.rank())] if messages else calls, None)

    def connect(self, device: torch.device) -> None:
        """Make the communicator at once: init_process_group(device_id=...)."""
        self.bound_device_id = device
        self._communicator((), device).connect_now()

    def split(self, store: c10d.Store, ranks: list[int], options: NcclOptions) -> Any:
        """The group of some of this group's ranks; None for a rank outside."""
        self._splits += 1
        if self.rank() not in ranks:
            return None
        inner = c10d.PrefixStore(f"split/{options.group_name}", store)
        return type(self)(inner, ranks.index(self.rank()), len(ranks), options)

    def perform_nocolor_split(self, _device: torch.device) -> None:
        """Take part in a split without being in the new group."""
        self._splits += 1

    def comm_split_count(self) -> int:
        return self._splits

    def options_of_group(self) -> NcclOptions:
        return self.options

    def sequence_number(self) -> int:
        return self._sequence[False]

    def abort(self) -> None:
        """End this group's communicators and what they have begun."""
        self._why_aborted = (
            self._why_aborted or f"NCCL communicator was aborted on rank {self.rank()}."
        )
        for communicator in self._communicators.values():
            communicator.abort()

    def shutdown(self) -> None:
        """End this group after all that it was given."""
        for communicator in self._communicators.values():
            communicator.close()
        self._communicators.clear()
        nccl_watch.groups.remove(self)

    def pending(self) -> list[Pending]:
        """What has not ended, the oldest of each communicator first."""
        return [p for communicator in self._communicators.values() for p in list(communicator.open)]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options.timeout = timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        for pending in self.pending():
            pending.timeout += timeout

    def _group_start(self) -> None: ...

    def _group_end(self) -> None: ...

    # How a call becomes a pending collective.

    def _submit(self, calls: list[Call], opts: Any, pair: tuple[int, ...] = ()) -> Pending | None:
        """Queue calls as one collective. None while a batch is open."""
        if self._batch is not None:
            self._batch += calls
            return None
        if self._why_aborted:
            raise dist.DistBackendError(self._why_aborted)
        device = calls[0].tensors[0].device
        for tensor in [tensor for call in calls for tensor in call.tensors]:
            if tensor.device != device:
                raise ValueError("Expected list of tensors on the same device")
        communicator = self._communicator(pair, device)
        is_async = getattr(opts, "asyncOp", True)
        if is_async:
            communicator.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(communicator.stream if is_async else None):
            for call in calls:
                self._touch(call)
            end = communicator.stream.record_event() if is_async else None
        is_message = bool(pair)
        self._sequence[is_message] += 1
        pending = Pending(
            communicator,
            calls,
            end,
            self._sequence[is_message],
            self._timeout_of(opts),
            before="" if is_message else self._calls_of_other_groups(),
        )
        nccl_watch.record(self, pending, is_message=is_message)
        communicator.submit(pending)
        return pending

    def _calls_of_other_groups(self) -> str:
        """How many collectives each other group of this process has begun, by name."""
        others = [group for group in nccl_watch.groups if group is not self]
        return " ".join(f"{group.group_uid}={group.sequence_number()}" for group in others)

    def _touch(self, call: Call) -> None:
        """Tell the clocks of streams what a call reads and writes, and count it."""
        for tensor in call.inputs:
            native.touch(tensor, False, call.title)
        for tensor in call.outputs:
            native.touch(tensor, True, call.title)
        carried = call.inputs or call.outputs
        key = (self.group_uid, call.title, str(carried[0].dtype).removeprefix("torch."))
        counted[key] += 1
        counted_bytes[key] += sum(tensor.numel() * tensor.element_size() for tensor in carried)

    def _timeout_of(self, opts: Any) -> timedelta:
        asked = getattr(opts, "timeout", timedelta(milliseconds=-1))
        return asked if asked > timedelta(0) else self.options.timeout

    def _communicator(self, pair: tuple[int, ...], device: torch.device) -> Communicator:
        """What runs the collectives of all ranks, or the messages of a pair, on a device."""
        key = (pair, device)
        if key not in self._communicators:
            members = pair or range(self.size())
            made = sum(other == pair for other, _ in self._communicators)
            store = c10d.PrefixStore(f"emulated-nccl/{pair}/{made}", self._store)
            self._communicators[key] = Communicator(
                device,
                lambda: connected(store, self.rank(), members, device),
                lambda pending: nccl_watch.timed_out(self, pending),
                f"nccl {self.group_uid} {pair or 'all ranks'}",
            )
        return self._communicators[key]
