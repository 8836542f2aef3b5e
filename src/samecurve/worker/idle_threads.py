"""How long the idle threads of a numeric library stay awake."""

import os


def let_threads_wait() -> None:
    """Have a library's idle threads sleep soon, in this process and in the processes it starts.

    To be called before torch is imported. OMP_WAIT_POLICY and GOMP_SPINCOUNT stay as the user has
    set them. By default the threads spin 300,000 turns: a small model's step then took 76 ms beside
    other programs on the same cores, and 7 ms on a quiet machine. With threads that sleep at once
    it took 16 and 17 ms; as set here, 28 and 8 ms. libgomp, which torch's wheels bring, reads the
    turns; other libraries read the policy. docs/benchmarks.md has both cases.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
