"""The engine of a plan in this process: the only place where engines are chosen.

A process joins its peers, makes the engine, and leaves its peers in order.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.core.config.sections import Optimizer
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Engine, Rank, Task
from samecurve.core.system.cache import cache_home

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

    from samecurve.core.measurement.profile_types import ProfileSchedule

JOIN = timedelta(minutes=30)
# CPU devices of a process that will train on several numbers of devices: making more later throws
# away all that was compiled
_SPARE = 8


@dataclass(frozen=True)
class EngineSession:
    """A process's place among those that train together."""

    make_engine: Callable[[Task, Optimizer], Engine]
    leave: Callable[[], None] = lambda: None  # called when nothing more is to be done together


def _give_back_blocks_from(size: int) -> None:
    """Have blocks of memory of at least so many bytes go back to the system once they are freed.

    Does what glibc's MALLOC_MMAP_THRESHOLD_ does, which stays where a user has set it. Without
    glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(-3, size)  # M_MMAP_THRESHOLD


def import_engine(plan: Plan) -> None:
    """Import the engine and its library, which takes seconds."""
    import_module(f"samecurve.{plan.layout.engine}_engine.engine")


def join(plan: Plan, rank: Rank, store: "Store | None", coordinator: str | None) -> EngineSession:
    """Meet the other ranks.

    store: torch's rendezvous; None: the environment names it.
    coordinator: host:port where jax's processes meet.
    """
    if plan.layout.engine == "jax":
        return _join_jax(plan, rank, coordinator)
    return _join_torch(plan, rank, store)


def join_warm(
    plan: Plan, index: int, group: "ProcessGroup | None", *, more: bool = True
) -> EngineSession:
    """Join in a warm process, which is a rank of torch's `group` already.

    more: the process will train more, on other numbers of devices.
    """
    if plan.layout.engine == "jax":
        # torch may want the same GPU's memory next
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        least = _SPARE if more else 1
        return _jax_session(plan, index, least=least)
    if plan.layout.backend == "none":
        group = None
    return _torch_session(plan, group, _torch_devices(plan, index))


def _torch_devices(plan: Plan, index: int) -> "list[torch.device]":
    """The devices of one process. The first GPU becomes the current one."""
    import torch

    torch.set_num_threads(plan.compute.threads)
    if plan.compiles_blocks:
        # a second start reads what the first one compiled
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "inductor"))
    devices = [
        torch.device(plan.layout.devices[place].place) for place in plan.layout.devices_of(index)
    ]
    if devices[0].type == "cpu" and plan.layout.shards > 1:
        # without it glibc keeps the memory of each gathered block: 804 MiB instead of 326 were
        # measured after 4 steps of 26M parameters
        _give_back_blocks_from(1 << 20)
    if devices[0].type == "cuda":
        if plan.compute.deterministic and torch.version.cuda:
            from samecurve.worker.cublas import set_repeating_workspace

            started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            set_repeating_workspace(os.environ, cuda_started=started)
        torch.cuda.set_device(devices[0])
    return devices


def _torch_session(
    plan: Plan,
    group: "ProcessGroup | None",
    devices: "list[torch.device]",
    leave: Callable[[], None] = lambda: None,
) -> EngineSession:
    from samecurve.torch_engine.engine import TorchEngine
    from samecurve.torch_engine.process_group import Comm

    def make_engine(task: Task, optimizer: Optimizer) -> Engine:
        return TorchEngine(task, plan, optimizer, Comm(group), devices)

    return EngineSession(make_engine, leave)


def _join_torch(plan: Plan, rank: Rank, store: "Store | None") -> EngineSession:
    import torch.distributed as dist

    devices = _torch_devices(plan, rank.index)
    if plan.layout.backend == "none":
        return _torch_session(plan, None, devices)
    options: dict[str, Any] = {}
    if plan.layout.backend == "nccl":
        options["device_id"] = devices[0]
    if store is not None:
        options |= {"store": store, "rank": rank.index, "world_size": rank.world_size}
    dist.init_process_group(plan.layout.backend, timeout=JOIN, **options)

    def leave() -> None:
        dist.barrier()  # no rank takes the rendezvous away while another still needs it
        dist.destroy_process_group()

    return _torch_session(plan, dist.group.WORLD, devices, leave)


def _jax_session(
    plan: Plan, index: int, leave: Callable[[], None] = lambda: None, *, least: int = 1
) -> EngineSession:
    """Begin to use jax's devices. least: the least number of CPU devices of this process."""
    from samecurve.jax_engine import runtime
    from samecurve.jax_engine.engine import JaxEngine

    variables = runtime.environment(plan, index, os.environ)
    os.environ.update(variables)
    runtime.configure(
        plan,
        index,
        str(cache_home() / "jax"),
        platforms=os.environ.get("JAX_PLATFORMS", ""),
        least=least,
        anew=runtime.changes_threads(variables),
    )
    devices = runtime.devices_of(plan)
    return EngineSession(
        lambda task, optimizer: JaxEngine(task, plan, optimizer, devices, index), leave
    )


def _join_jax(plan: Plan, rank: Rank, coordinator: str | None) -> EngineSession:
    from samecurve.jax_engine import runtime

    if coordinator is None:
        return _jax_session(plan, rank.index)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    runtime.configure(plan, rank.index, str(cache_home() / "jax"), platforms=platforms)
    runtime.join(coordinator, plan, rank.index)
    return _jax_session(plan, rank.index, runtime.leave)


def watch_of(
    engine: Any, plan: Plan, course: "ProfileSchedule", scratch: Path, trace: Path | None
) -> Any:
    """The engine's watch over its steps. trace: where the profiler's trace goes; None: no trace."""
    if plan.layout.engine == "jax":
        from samecurve.jax_engine.profiler import JaxWatch

        return JaxWatch(engine, course, scratch, trace)
    from samecurve.torch_engine.profiling.profiler import TorchWatch

    return TorchWatch(engine, course, trace)
