"""Tells other processes what this process holds on its GPUs, as a driver would know it.

A thread writes it down whenever it has changed. The stand-ins for the drivers' libraries read it.
It starts when this process first uses a GPU: a process that is forked from has no threads.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from samecurve_products.rehearse.emulated_cuda.gpus import STATE, write_held

_INTERVAL = 0.1  # seconds


def tell_memory(gpus: Sequence[int], used: Callable[[int], int]) -> None:
    """Begin to tell, if the processes of the emulated machine share a directory (gpus.STATE).

    gpus: the machine's number of cuda:0, cuda:1, ...
    used: the bytes that this process's tensors take on such a device
    """
    if not os.environ.get(STATE):
        return
    state = Path(os.environ[STATE])

    def work() -> None:
        told: dict[int, int] = {}
        while True:
            now = {gpu: used(device) for device, gpu in enumerate(gpus)}
            # a context stays after its last tensor
            held = {gpu: taken for gpu, taken in now.items() if taken or gpu in told}
            if held != told:
                write_held(state, held)
                told = held
            time.sleep(_INTERVAL)

    threading.Thread(target=work, name="emulated driver", daemon=True).start()
