"""The answers of a rank that the hang watch asks by a signal: the stacks of its threads, and the
collectives that it entered.

The stacks are written by the signal's own handler, which needs neither the interpreter nor its
lock. The record of collectives is read by a thread that the same signal wakes, so the rank answers
while its main thread waits inside a library.
"""

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from samecurve.watch.flight_recorder import record

ASK_SIGNAL = signal.SIGUSR2


@contextmanager
def answering(logs: Path, rank: int) -> Iterator[None]:
    """Answer the hang watch while the block runs. Called in the main thread."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    thread = threading.Thread(
        target=_answer, args=(woken, logs / f"collectives-{rank}.json"), name="answers", daemon=True
    )
    with open(logs / f"stack-{rank}.txt", "w") as stacks:
        old_handler = signal.signal(ASK_SIGNAL, lambda *_: None)
        old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        faulthandler.register(ASK_SIGNAL, file=stacks, all_threads=True, chain=True)
        thread.start()
        try:
            yield
        finally:
            faulthandler.unregister(ASK_SIGNAL)
            signal.set_wakeup_fd(old_wake)
            signal.signal(ASK_SIGNAL, old_handler)
            os.close(wake)
            thread.join()
            os.close(woken)


def _answer(woken: int, path: Path) -> None:
    while number := os.read(woken, 1):
        if number[0] == ASK_SIGNAL:
            with suppress(OSError):  # a full disk: the stacks say something too
                record(str(path))
