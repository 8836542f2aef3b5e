"""Tells other processes what this process holds on its GPUs, as a driver would know it.

A thread writes it down whenever it has changed. The stand-ins for the drivers' libraries read it.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from emulated_cuda.gpus import write_held

_INTERVAL = 0.1  # seconds


def tell_memory(state: Path, count: int, used: Callable[[int], int]) -> None:
    """Begin to tell.

    state: the directory that the processes of the emulated machine share
    count: of GPUs. used: the bytes that this process's tensors take on a GPU
    """

    def work() -> None:
        told: dict[int, int] = {}
        while True:
            now = {gpu: used(gpu) for gpu in range(count)}
            # a context stays after its last tensor
            held = {gpu: taken for gpu, taken in now.items() if taken or gpu in told}
            if held != told:
                write_held(state, held)
                told = held
            time.sleep(_INTERVAL)

    threading.Thread(target=work, name="emulated driver", daemon=True).start()
