"""Tasks of a Slurm job on this machine: the variables that srun would set."""

import socket
from contextlib import suppress

from samecurve.worker import from_slurm


def slurm_variables(task: int, job: int) -> dict[str, str]:
    """What srun sets in one of two tasks, each on a node of its own (here both on this one)."""
    return {
        "SLURM_PROCID": str(task),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "localhost,other[1-3]",
        "SLURM_JOB_ID": str(job),
    }


def free_slurm_job() -> int:
    """A job whose port is free."""
    for job in range(7000, 8000):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", int(from_slurm(slurm_variables(0, job))["MASTER_PORT"])))
            return job
    raise AssertionError("no port is free")
