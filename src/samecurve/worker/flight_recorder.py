"""A script's rank as its launcher sees it: how many collectives it has entered, and, asked, where
its threads are. Nothing of the script is changed.

Run from launch/script/bootstrap.py, by its path, without the package. heartbeat-N: sixteen bytes as
observe/heartbeat.py has them (step and beats: collectives, phase: a step); stack-N.txt: written by
faulthandler when the signal comes; collectives-N.json: the last of torch's flight recorder, written
when the file `asked` appears.
"""

import faulthandler
import json
import os
import struct
import sys
import threading
import time
from typing import Any

_EVERY = 0.5  # seconds
PHASE = 5  # of core/events.PHASES: a step
_KEPT = 50  # entries


def begin(home: str, rank: str, number: int) -> None:
    """number: of the signal that asks for stacks."""
    try:
        # held as long as the process lives
        stacks = open(os.path.join(home, f"stack-{rank}.txt"), "w")  # noqa: SIM115
    except OSError:
        return  # no room; the script may still run
    faulthandler.register(number, file=stacks, all_threads=True)
    threading.Thread(
        target=_beat, args=(home, rank, os.getpid()), name="samecurve", daemon=True
    ).start()


def _beat(home: str, rank: str, own_pid: int) -> None:
    before = None
    while os.getpid() == own_pid:
        time.sleep(_EVERY)
        try:
            count = _entered()
            if count != before and count is not None:
                _write(
                    os.path.join(home, f"heartbeat-{rank}"),
                    struct.pack("<qII", count, PHASE, count & 0xFFFFFFFF),
                )
                before = count
            answer = os.path.join(home, f"collectives-{rank}.json")
            if os.path.exists(os.path.join(home, "asked")) and not os.path.exists(answer):
                record(answer)
        except (OSError, RuntimeError):  # no room, or the group is just being made or taken apart
            continue


def _entered() -> int | None:
    """Collectives of all its groups. None: it is in none (yet)."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not getattr(c10d, "is_initialized", bool)():
        return None
    groups = list(c10d._world.pg_map)  # noqa: SLF001 - torch has no public list of them
    entered: int = sum(group._get_sequence_number_for_group() for group in groups)  # noqa: SLF001
    return entered


def record(path: str) -> None:
    """Write the last entries of torch's flight recorder, oldest first; none, where torch, its
    collectives or the recorder are not in use.
    """
    _write(path, json.dumps(_recorded()[-_KEPT:]).encode())


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
