"""Ways for a rank to fail, each a function that runs in a process of its own (see provoke.py)."""

import ctypes
import faulthandler
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SHORT, LONG = timedelta(seconds=1), timedelta(seconds=20)
UNABLE = 77  # exit code: this user may not make that failure


def join(timeout: timedelta = LONG, world: int = 2) -> None:
    os.environ["WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", timeout=timeout)


class Two(nn.Module):
    """Two layers, of which only the first has a part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


class Samples(Dataset[torch.Tensor]):
    """Eight samples; some way to fail at the fourth."""

    def __init__(self, fail: Callable[[], object], size: int = 1) -> None:
        self.fail, self.size = fail, size

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            self.fail()
        return torch.ones(self.size)


def read(fail: Callable[[], object], size: int = 1) -> None:
    list(DataLoader(Samples(fail, size), num_workers=1, batch_size=2))


def broken() -> None:
    raise ValueError("sample 3 is broken")


def small_disk(home: Path) -> Path:
    """64 KiB, seen by this process alone."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000):
        os._exit(UNABLE)
    home.mkdir(exist_ok=True)
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(home)],
    ):
        if subprocess.run(command, check=False, capture_output=True).returncode:
            os._exit(UNABLE)
    return home


def limited(limit: int, value: int) -> None:
    resource.setrlimit(limit, (value, value))


def python(*arguments: str) -> None:
    os.execv(sys.executable, [sys.executable, *arguments])


def address_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        join(world=1)


def master_refuses() -> None:
    os.environ["RANK"] = "1"
    join(SHORT)


def too_few_ranks() -> None:
    join(SHORT)


def late_for_a_collective() -> None:
    join(SHORT)
    if dist.get_rank():
        time.sleep(4)
        os._exit(0)
    dist.all_reduce(torch.ones(1))


def nobody_answers() -> None:
    dist.TCPStore("127.0.0.1", 0, 1, True, timeout=SHORT).get("word")  # type: ignore[attr-defined]


def late_for_a_barrier() -> None:
    join(LONG)
    if dist.get_rank():
        time.sleep(3)
        os._exit(0)
    dist.monitored_barrier(timeout=SHORT)


def unused_parameters() -> None:
    join()
    model = DistributedDataParallel(Two())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def models_differ() -> None:
    join()
    DistributedDataParallel(nn.Linear(2, 2) if dist.get_rank() else Two())


def model_shapes_differ() -> None:
    join()
    DistributedDataParallel(nn.Linear(2, 2 + dist.get_rank()))


def shapes_differ() -> None:
    join()
    dist.all_reduce(torch.ones(10 + 1000 * dist.get_rank()))
    dist.barrier()


def shapes_differ_in_detail() -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    shapes_differ()


def killed() -> None:
    join()
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def raised() -> None:
    join()
    if dist.get_rank():
        broken()
    dist.all_reduce(torch.ones(1))


def crashed() -> None:
    faulthandler.enable()
    faulthandler._sigsegv()  # type: ignore[attr-defined]


def left() -> None:
    print("the config names no data")
    os._exit(3)


def worker_killed() -> None:
    read(lambda: os.kill(os.getpid(), signal.SIGKILL))


def worker_raises() -> None:
    read(broken)


def worker_without_room() -> None:
    small_disk(Path("/dev/shm"))
    read(int, 1 << 20)


def no_space() -> None:
    (small_disk(Path("disk").absolute()) / "numbers").write_bytes(bytes(1 << 20))


def no_space_to_save() -> None:
    torch.save(torch.ones(1 << 18), small_disk(Path("disk").absolute()) / "model.pt")


def truncated() -> None:
    torch.save(torch.ones(1000), "model.pt")
    os.truncate("model.pt", 1000)
    torch.load("model.pt")


def pickled() -> None:
    torch.save({"path": Path("x")}, "model.pt")
    torch.load("model.pt")


def module_missing() -> None:
    __import__("nonesuch.part")


def name_missing() -> None:
    exec("from os import nonesuch")


def syntax() -> None:
    Path("script.py").write_text("x = 1\ndef f(:\n    pass\n")
    python("script.py")


def no_guard() -> None:
    Path("script.py").write_text(
        "import multiprocessing\n"
        "child = multiprocessing.get_context('spawn').Process(target=print)\n"
        "child.start()\n"
        "child.join()\n"
        "raise SystemExit(child.exitcode)\n"
    )
    python("script.py")


def numpy_memory() -> None:
    limited(resource.RLIMIT_AS, 8 << 30)
    np.ones((4, 1 << 30))


def torch_memory() -> None:
    limited(resource.RLIMIT_AS, 8 << 30)
    torch.ones((4, 1 << 30))


def python_memory() -> None:
    limited(resource.RLIMIT_AS, 8 << 30)
    bytearray(32 << 30)


def library_memory() -> None:
    python(
        "-c",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20)); import"
        " torch",
    )


def no_thread() -> None:
    limited(resource.RLIMIT_NPROC, 1)
    with suppress(PermissionError):
        os.setuid(65534)  # root is not limited
    threading.Thread(target=print).start()


def no_files() -> None:
    limited(resource.RLIMIT_NOFILE, 40)
    [open("/dev/null") for _ in range(100)]  # noqa: SIM115


def sparse_gradients() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def other_model() -> None:
    Two().load_state_dict(nn.Linear(2, 2).state_dict())


def other_shapes() -> None:
    nn.Linear(2, 2).load_state_dict(nn.Linear(2, 3).state_dict())


def saved_from_ddp() -> None:
    nn.Linear(2, 2).load_state_dict(
        {f"module.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}
    )


def no_cuda() -> None:
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")  # also where there is one
    torch.ones(1).cuda()


def no_group() -> None:
    dist.all_reduce(torch.ones(1))


def no_rank() -> None:
    del os.environ["RANK"]
    dist.init_process_group("gloo")
