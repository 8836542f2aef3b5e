"""How far a script's rank has come in its collectives, seen without changing the script.

launch/script/bootstrap.py runs this file by its path, without the package. It writes what ranks of
ours write: heartbeat-N (sixteen bytes as in observe/__init__.py; step and beats count collectives,
the activity is a step), stack-N.txt (the main thread when the signal comes, all threads once the
file `asked` is there), and then collectives-N.json (entries of torch's flight recorder).
"""

import faulthandler
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

_EVERY = 0.5  # seconds
ACTIVITY = 5  # the index of "step" in core/events.ACTIVITIES
_KEPT = 50  # entries


def begin(home: str, rank: str, number: int) -> None:
    """Start to record. number: of the signal that asks for stacks."""
    try:
        # open as long as the process lives
        stacks = open(os.path.join(home, f"stack-{rank}.txt"), "w")  # noqa: SIM115
    except OSError:
        return  # no room; the script may still run
    # of the main thread alone: other threads' frames may be freed while a signal's handler reads
    faulthandler.register(number, file=stacks, all_threads=False)
    arguments = (home, rank, os.getpid(), stacks)
    threading.Thread(target=_beat, args=arguments, name="samecurve", daemon=True).start()


def _beat(home: str, rank: str, own_pid: int, stacks: TextIO) -> None:
    before = None
    while os.getpid() == own_pid:
        time.sleep(_EVERY)
        try:
            count = _entered()
            if count != before and count is not None:
                _write(
                    os.path.join(home, f"heartbeat-{rank}"),
                    struct.pack("<qII", count, ACTIVITY, count & 0xFFFFFFFF),
                )
                before = count
            answer = os.path.join(home, f"collectives-{rank}.json")
            if os.path.exists(os.path.join(home, "asked")) and not os.path.exists(answer):
                faulthandler.dump_traceback(file=stacks, all_threads=True)
                record(answer)
        except (OSError, RuntimeError):  # no room, or the group is just being made or taken apart
            continue


def _entered() -> int | None:
    """How many collectives the process has entered, over all groups; None: it is in no group."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not getattr(c10d, "is_initialized", bool)():
        return None
    groups = list(c10d._world.pg_map)  # noqa: SLF001 - torch has no public list of them
    entered: int = sum(group._get_sequence_number_for_group() for group in groups)  # noqa: SLF001
    return entered


def record(path: str) -> None:
    """Write entries of torch's flight recorder, oldest first: the last ones, or those up to the
    first collective that has not ended. A GPU's host may have queued hundreds behind it.

    The list is empty where torch, its collectives or the recorder are not in use.
    """
    entries = _recorded()
    end = next((place + 1 for place, entry in enumerate(entries) if not has_ended(entry)), None)
    _write(path, json.dumps(entries[:end][-_KEPT:]).encode())


def has_ended(entry: Mapping[str, Any]) -> bool:
    """Whether a collective of the flight recorder is done."""
    return bool(entry["retired"]) or entry["state"] == "completed"


def _recorded() -> list[Any]:
    native = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(native, name, None)
        entries = json.loads(dump()).get("entries", []) if dump else []
        if entries:
            return sorted(entries, key=lambda entry: int(entry["record_id"]))
    return []


def _write(path: str, content: bytes) -> None:
    with open(f"{path}.part", "wb") as file:
        file.write(content)
    os.replace(f"{path}.part", path)
