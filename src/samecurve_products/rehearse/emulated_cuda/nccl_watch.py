"""Sees that a collective of the emulated NCCL does not end: timeouts, flight recorder, synchronize.

After the timeout torch's watchdog takes the process down, unless TORCH_NCCL_ASYNC_ERROR_HANDLING
says otherwise. So does this one, with torch's text.
"""

import json
import os
import sys
import threading
import time
from collections import deque
from datetime import datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import emulated_cuda_native as native
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from samecurve_products.rehearse.emulated_cuda.communicator import Call, Pending
    from samecurve_products.rehearse.emulated_cuda.nccl_group import NcclGroup

_OFTEN = 0.1  # seconds between two looks
_CERTAIN = 5.0  # seconds that a rehearsal waits for what will never end
_ENTRIES = 2000  # of the flight recorder, as TORCH_FR_BUFFER_SIZE has it by default
_NO_HANDLING, _TEAR_DOWN, _CLEAN_UP_ONLY, _SKIP_CLEAN_UP = "0", "1", "2", "3"

groups: list["NcclGroup"] = []  # all that live; Python must hold what otherwise only C++ refers to
_entries: deque[tuple[dict[str, Any], threading.Event]] = deque(maxlen=_ENTRIES)
_numbers = count()


def add(group: "NcclGroup") -> None:
    """Watch a group until it leaves `groups`."""
    groups.append(group)
    if len(groups) == 1:
        threading.Thread(target=_watch, name="nccl watchdog", daemon=True).start()


def install() -> None:
    """Have `synchronize` wait for collectives, and torch's flight recorder show them."""
    synchronize = torch.cuda.synchronize

    def synchronize_with_collectives(device: Any = None) -> None:
        _wait_for_device(torch.cuda._utils._get_device_index(device, optional=True))
        synchronize(device)

    torch.cuda.synchronize = synchronize_with_collectives
    torch._C._distributed_c10d._dump_nccl_trace_json = dump_json


def _wait_for_device(index: int) -> None:
    for group in list(groups):
        for pending in group.pending():
            if pending.communicator.device.index == index:
                pending.wait_for_end(None)


def describe(pending: "Pending") -> str:
    """The collective as torch's messages name it."""
    call = pending.call
    return (
        f"WorkNCCL(SeqNum={pending.number}, OpType={call.operation}, "
        f"NumelIn={pending.elements[0]}, NumelOut={pending.elements[1]}, "
        f"Timeout(ms)={pending.timeout // timedelta(milliseconds=1)})"
    )


def timed_out(group: "NcclGroup", pending: "Pending") -> Exception:
    """The exception of a collective that has run for too long."""
    return dist.DistBackendError(_timeout_text(group, pending))


def _timeout_text(group: "NcclGroup", pending: "Pending") -> str:
    milliseconds = int((time.time() - pending.started) * 1000)
    return (
        f"[Rank {group.rank()}] Watchdog caught collective operation timeout: "
        f"{describe(pending)} ran for {milliseconds} milliseconds before timing out."
    )


def _watch() -> None:
    while groups:
        time.sleep(_OFTEN)
        _look()


def _look() -> None:
    """End what has run for too long. No reference to a group outlives the call."""
    for group in list(groups):
        for pending in group.pending():
            limit = pending.timeout.total_seconds()
            if pending.communicator.hangs and os.environ.get("EMULATED_CUDA_REPORT"):
                limit = min(limit, _CERTAIN)
            if time.time() - pending.started > limit:
                _end(group, pending)
                break


def _end(group: "NcclGroup", pending: "Pending") -> None:
    """What torch's watchdog does with a collective that has run for too long."""
    handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", _SKIP_CLEAN_UP)
    text = _timeout_text(group, pending)
    _log(text)
    if not pending.communicator.hangs:  # why it hangs is not reported yet
        waited = f"{time.time() - pending.started:.0f} s"
        native.found("hang", f"{describe(pending)} has not ended in {waited}", pending.place)
    if handling in (_TEAR_DOWN, _CLEAN_UP_ONLY) or handling == _NO_HANDLING:
        group.abort()
    if handling in (_NO_HANDLING, _CLEAN_UP_ONLY):
        return
    place = f"[PG ID {group.uid} PG GUID {group.group_uid} Rank {group.rank()}]"
    _log(
        "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA"
        " kernels, subsequent GPU operations might run on corrupted/incomplete data.",
    )
    _log("To avoid data inconsistency, we are taking the entire process down.")
    _log(f"{place} Process group watchdog thread terminated with exception: {text}")
    sys.stderr.write(
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  {place} Process group watchdog thread terminated with exception: {text}\n"
    )
    sys.stderr.flush()
    os.abort()


def _log(text: str) -> None:
    now = datetime.now()
    stamp = f"E{now:%m%d %H:%M:%S.%f} {os.getpid()} ProcessGroupNCCL.cpp"
    sys.stderr.write(f"[rank{dist.get_rank() if dist.is_initialized() else 0}]:[{stamp}] {text}\n")
    sys.stderr.flush()


def record(group: "NcclGroup", pending: "Pending", *, is_message: bool) -> None:
    """Note a collective in the flight recorder."""
    call, number = pending.call, next(_numbers)
    entry = {
        "record_id": number,
        "pg_id": group.uid,
        "process_group": [group.group_uid, group.group_description],
        "collective_seq_id": 0 if is_message else pending.number,
        "p2p_seq_id": pending.number if is_message else 0,
        "op_id": number + 1,
        "profiling_name": call.title,
        "time_created_ns": time.time_ns(),
        "input_sizes": _sizes(call, "inputs"),
        "input_dtypes": _dtypes(call, "inputs"),
        "output_sizes": _sizes(call, "outputs"),
        "output_dtypes": _dtypes(call, "outputs"),
        "timeout_ms": pending.timeout // timedelta(milliseconds=1),
        "is_p2p": is_message,
    }
    _entries.append((entry, pending.done))  # not the collective, which keeps its tensors


def _sizes(call: "Call", side: str) -> list[list[int]]:
    return [list(tensor.shape) for tensor in getattr(call, side)]


def _dtypes(call: "Call", side: str) -> list[str]:
    return [str(tensor.dtype).removeprefix("torch.") for tensor in getattr(call, side)]


def dump_json(**_options: bool) -> bytes:
    """The flight recorder's entries, as torch's _dump_nccl_trace_json writes them."""
    entries = []
    for entry, done in list(_entries):
        ended = done.is_set()
        state = "completed" if ended else "started"
        entries.append({**entry, "state": state, "retired": ended})
    return json.dumps({"version": "2.10", "entries": entries}).encode()
