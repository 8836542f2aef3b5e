"""What a restart costs without us: torch's elastic launcher and a script whose rank 1 dies once."""

import os
import subprocess
import sys
from pathlib import Path

from chaos_machines import are_possible

from machines import machines

_TIMES = 3
_LIMIT = 120  # seconds for a script that sleeps for two
# writes down when it begins; rank 1 dies once, and its death is written down too
_EMPTY = """
import os, signal, sys, time
open(sys.argv[1] + os.environ["RANK"], "a").write(f"{time.time()}\\n")
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(0.5)
    open(sys.argv[1] + "died", "w").write(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
"""
# the same, but it begins when its ranks have met
_MEETING = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
""" + _EMPTY.replace("time.sleep(1)", "dist.barrier()")
_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def bare_restarts(home: Path) -> dict[str, list[float | None]]:
    """Seconds from a rank's death to the second beginning of both ranks, several times.

    None: the command had not ended after two minutes.
    """
    sides = {"empty script": _EMPTY, "ranks that meet over gloo": _MEETING}
    found: dict[str, list[float | None]] = {
        f"one machine, {name}": [_on_one(home, script) for _ in range(_TIMES)]
        for name, script in sides.items()
    }
    if not are_possible():
        for name, script in sides.items():
            found[f"two machines, {name}"] = [_on_two(home, script) for _ in range(_TIMES)]
    return found


def _words(*more: str) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1"]
    return [*torchrun, "--monitor-interval=0.1", *more, "script.py", "at-"]


def _on_one(home: Path, script: str) -> float | None:
    _prepare(home, script)
    words = _words("--standalone", "--nproc-per-node=2")
    environment = {**os.environ, **_ENVIRONMENT}
    try:
        subprocess.run(
            words, cwd=home, check=True, capture_output=True, timeout=_LIMIT, env=environment
        )
    except subprocess.TimeoutExpired:
        return None
    return _seconds(home)


def _on_two(home: Path, script: str) -> float | None:
    _prepare(home, script)
    with machines(2, home) as nodes:
        place = f"{nodes[0].address}:29500"
        words = _words("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={place}")
        for node in nodes:
            environment = {**_ENVIRONMENT, "GLOO_SOCKET_IFNAME": node.link}
            node.start_command(words, cwd=home, env=environment, names=True)
        try:
            for node in nodes:
                node.processes[0].wait(_LIMIT)
        except subprocess.TimeoutExpired:
            return None
    return _seconds(home)


def _prepare(home: Path, script: str) -> None:
    (home / "script.py").write_text(script)
    for path in home.glob("at-*"):
        path.unlink()


def _seconds(home: Path) -> float:
    begun = [float((home / f"at-{rank}").read_text().split()[1]) for rank in (0, 1)]
    return round(max(begun) - float((home / "at-died").read_text()), 2)
