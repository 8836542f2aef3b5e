"""How an exact run uses the cores of a machine without GPUs: by ranks, each with the same threads.

The number of threads inside an operation changes the order in which a CPU adds, so it never follows
from the ranks. One thread is the default; more ranks use more cores, and change no bit.
"""

from collections.abc import Callable, Sequence

from samecurve.core.config.sections import Config, Devices
from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import (
    MOST_CPU_RANKS,
    Device,
    DevicesDecision,
    Machine,
    has_open_ranks,
)
from samecurve.units import counted


def choose_exact_threads(
    threads: int | None, machine: Machine, fixed: Fixed | None
) -> Decision[int]:
    """Threads inside the operations of an exact run's CPU ranks, the same on any number of ranks.

    threads: devices.threads. fixed: what the run's first plan fixed, which stays
    """
    wanted = threads or machine.threads
    if fixed is not None:
        warnings: tuple[str, ...] = ()
        if wanted and wanted != fixed.threads:
            by = "devices.threads" if threads else "OMP_NUM_THREADS"
            warning = (
                f"{by} {wanted}: this run began with {counted(fixed.threads, 'thread')} a rank, and"
                " train.exact keeps them"
            )
            warnings = (warning,)
        return Decision(fixed.threads, {"threads": "as this run began"}, warnings)
    if threads:
        return Decision(threads, {"threads": "devices.threads"})
    if machine.threads:
        reason = "OMP_NUM_THREADS; another number gives other bits (devices.threads wins)"
        return Decision(machine.threads, {"threads": reason})
    reason = "1 in an operation on any number of ranks, so that all add in the same order"
    return Decision(1, {"threads": reason})


def ranks_for_cores(
    config: Config,
    machine: Machine,
    num_microbatches: int,
    fixed: Fixed | None,
    holds: Callable[[Sequence[Device]], bool],
) -> DevicesDecision | None:
    """The ranks of an exact run that leaves its devices open: one for each core that has a
    microbatch. None: one rank, or the config or a launcher says how many.

    num_microbatches: of a step. holds: whether so many ranks have room for the run
    """
    threads = choose_exact_threads(config.devices.threads, machine, fixed).value
    most = min(machine.cores // threads, num_microbatches, MOST_CPU_RANKS)
    if most < 2 or not has_open_ranks(config, machine):
        return None
    fitting = (count for count in range(most, 1, -1) if holds(machine.ranks_on_cpu(count)))
    count = next(fitting, 1)
    if count == 1:
        return None
    rounds = -(-num_microbatches // count)
    why = "one for each core that has a microbatch" if count == most else "as many as fit"
    if (fewest := -(-num_microbatches // rounds)) < count:
        count, why = fewest, f"the fewest with {counted(rounds, 'round')} a step"
    reason = f"no GPU found; {counted(count, 'CPU rank')}, {why} (--devices cpu: a single one)"
    return Decision(machine.ranks_on_cpu(count), {"devices": reason})


def say_idle_cores(
    section: Devices, layout: Layout, split: BatchSplit, machine: Machine, threads: int
) -> str:
    """The flag with which an exact run on CPU ranks would use more cores; '': it uses all, or the
    user counted the threads.
    """
    on_host = layout.num_devices // machine.hosts
    busy, cores = on_host * threads, machine.cores
    on_cpu = layout.devices[0].kind == "cpu" and layout.engine == "torch"
    if not on_cpu or busy >= cores or section.threads:
        return ""
    most = min(cores // threads, -(-split.num_microbatches // machine.hosts))
    if section.use.strip() != "auto" and most > on_host:
        used = "all cores" if most * threads == cores else f"{most * threads} of {cores} cores"
        return f"--devices cpu:{most} uses {used}"
    return f"{busy} of {counted(cores, 'core')} compute; --no-exact uses all"
