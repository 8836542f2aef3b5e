"""The jobs of `samecurve check`, each in a process of its own that may hang and is killed then.

A job tells in lines of JSON on its standard input, a socket, how far it has come. So whoever kills
it knows where it hung.
"""

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_TIMES = 3  # each collective is timed so often, and the quickest counts
_LONGEST = timedelta(hours=1)  # the process is killed long before


@dataclass(frozen=True, kw_only=True)
class CollectiveTest:
    """The work of a rank: collectives of one backend, and a step of DDP."""

    rank: int
    place: str  # torch's name of the device: cpu, cuda:0
    world: int
    backend: str
    store: str  # a file in which the ranks meet
    bytes: int  # of the whole array


def describe_torch(_value: str) -> None:
    """Tell what torch says of itself and of the GPUs."""
    report = reporter()
    try:
        import torch
    except Exception as error:
        report(stage="done", error=f"{type(error).__name__}: {error}")
        return
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "available": torch.cuda.is_available(),
        "nccl": "",
        "names": [],
        "arches": torch.cuda.get_arch_list(),
    }
    if facts["cuda"] or facts["hip"]:
        with suppress(AttributeError):  # a build without NCCL
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            facts["nccl"] = ".".join(map(str, version))
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            count = torch.cuda.device_count()
            facts["names"] = [torch.cuda.get_device_name(index) for index in range(count)]
        except (RuntimeError, AssertionError) as error:
            facts["error"] = str(error).partition("\n")[0]
    report(stage="done", **facts)


def describe_jax(_value: str) -> None:
    """Tell jax's version and devices."""
    report = reporter()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others need the GPUs too
    try:
        import jax

        devices = jax.devices()
        kinds = [device.platform != "cpu" for device in devices]
        report(stage="done", version=jax.__version__, devices=str(devices), gpus=sum(kinds))
    except Exception as error:
        report(stage="done", error=f"{type(error).__name__}: {error}".partition("\n")[0])


def try_collectives(value: str) -> None:
    """Try the collectives as one of the ranks. value: a CollectiveTest, as JSON."""
    test = CollectiveTest(**json.loads(value))
    report = reporter()
    import torch
    import torch.distributed as dist

    # public as torch.distributed.FileStore, where type checkers don't see it
    from torch._C._distributed_c10d import FileStore

    from samecurve.torch_engine.profiling.collective_bench import time_collective

    torch.set_num_threads(1)
    device = torch.device(test.place)
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if test.backend == "nccl":
            options["device_id"] = device  # NCCL connects at once, not at the first collective
    report(stage="joining")
    store = FileStore(test.store, test.world)
    dist.init_process_group(
        test.backend,
        store=store,
        rank=test.rank,
        world_size=test.world,
        timeout=_LONGEST,
        **options,
    )
    group = dist.group.WORLD
    assert group is not None
    # Gloo lacks some collectives on GPUs' arrays, and adds up in the host's memory anyway
    arrays_on = device if test.backend == "nccl" else torch.device("cpu")
    for name in ("all-reduce", "broadcast", "all-gather"):
        report(stage=name)
        seconds = time_collective(name, group, arrays_on, test.bytes, _TIMES)
        report(stage=name, seconds=min(seconds))
    report(stage="DDP step")
    report(stage="DDP step", difference=_try_ddp(test, device, group))
    dist.barrier()  # no rank leaves while another still needs it
    report(stage="done")


def reporter() -> Callable[..., None]:
    """The function that sends a line to the process that started this one.

    When it is gone, that process takes this one for ended.
    """
    pipe = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def report(**values: object) -> None:
        pipe.sendall(json.dumps(values).encode() + b"\n")

    report(stage="started")
    return report


def _try_ddp(test: CollectiveTest, device: "torch.device", group: "ProcessGroup") -> float:
    """A step of DDP beside the same step of one process over all rows.

    Returns the largest difference of their gradients, relative to the largest gradient.
    """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    rows = torch.randn(4 * test.world, 8, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    alone, rows = deepcopy(net).to(device), rows.to(device)
    wrapped = DistributedDataParallel(net.to(device), process_group=group)
    own = rows[4 * test.rank : 4 * test.rank + 4]
    wrapped(own).square().mean().backward()
    alone(rows).square().mean().backward()
    differences = [
        float((mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
        for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True)
        if mine.grad is not None and theirs.grad is not None
    ]
    return max(differences)
