"""What a rank can say of itself while it hangs: the stacks of its threads, and the collectives that
it entered.

Asked by a signal. The stacks are written by the signal's own handler, which needs neither the
interpreter nor its lock; the recorder of collectives is read by a thread that the same signal
wakes, so it answers while the main thread waits inside a library.
"""

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samecurve.diagnose.hang import Collective
from samecurve.worker.flight_recorder import record

ASK = signal.SIGUSR2


@contextmanager
def attending(logs: Path, rank: int) -> Iterator[None]:
    """While the block runs, in the main thread, this process answers."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    thread = threading.Thread(
        target=_answer, args=(woken, logs / f"collectives-{rank}.json"), name="witness", daemon=True
    )
    with open(logs / f"stack-{rank}.txt", "w") as stacks:
        before = signal.signal(ASK, lambda *_: None)
        other = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        faulthandler.register(ASK, file=stacks, all_threads=True, chain=True)
        thread.start()
        try:
            yield
        finally:
            faulthandler.unregister(ASK)
            signal.set_wakeup_fd(other)
            signal.signal(ASK, before)
            os.close(wake)
            thread.join()
            os.close(woken)


def _answer(woken: int, path: Path) -> None:
    while number := os.read(woken, 1):
        if number[0] == ASK:
            with suppress(OSError):  # a full disk: the stacks say something too
                record(str(path))


def last_collective(entries: Sequence[Mapping[str, Any]] | None) -> Collective | None:
    """The last one of a rank's record.

    number: over all its groups, which every rank enters in the same order.
    """
    if not entries:
        return None
    last = entries[-1]
    return Collective(
        int(last["record_id"]),
        str(last["profiling_name"]).partition(":")[2] or str(last["profiling_name"]),
        str(last["input_sizes"]),
        bool(last["retired"]) or last["state"] == "completed",
    )
