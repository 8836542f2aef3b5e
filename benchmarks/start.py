"""From a command to its end with two training steps in between: what a start costs.

One perceptron, on one process and on two CPU ranks: `samecurve train` (planned, its split checked,
a checkpoint at the end) beside a plain script under python, torchrun and accelerate launch (which
neither checks nor saves), in turns. Writes benchmarks/results/start-<cpu>.json. Run: python -m
benchmarks.start (the extra `bench`).
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.common import alternate, paired
from benchmarks.page import publish

_SCRIPT = """
import os
import sys

import torch
from torch import distributed, nn

if "accelerate" in sys.argv:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
elif "RANK" in os.environ:
    distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters())
if "accelerate" in sys.argv:
    model, optimizer = accelerator.prepare(model, optimizer)
elif "RANK" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
for _ in range(2):
    loss = model(torch.randn(32, 2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if distributed.is_initialized():
    distributed.destroy_process_group()
"""
_PYTHON = sys.executable
_ROOT = Path(__file__).parent.parent
_TASK = _ROOT / "examples" / "my_task"


def _commands(script: Path) -> dict[str, Sequence[str]]:
    module = (_PYTHON, "-m")
    task = ("-f", f"{_TASK}.yaml", "--set", f"task={_TASK}.py:MyTask")
    ours = (*module, "samecurve", "train", *task, "--max-steps", "2")
    two_accelerated = ("accelerate.commands.launch", "--cpu", "--num_processes", "2")
    return {
        "samecurve, 1 process": (*ours, "--devices", "cpu:1"),
        "python": (_PYTHON, str(script)),
        "samecurve, 2 ranks": (*ours, "--devices", "cpu:2"),
        "torchrun, 2 ranks": (*module, "torch.distributed.run", "--nproc-per-node=2", str(script)),
        "accelerate launch, 2 ranks": (
            *module,
            *two_accelerated,
            *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
            *(str(script), "accelerate"),
        ),
    }


_BESIDE = {
    "samecurve, 1 process": "python",
    "samecurve, 2 ranks": "torchrun, 2 ranks",
}


def _seconds(name: str, command: Sequence[str]) -> float:
    """Seconds of a command in an empty directory, which it may fill; nan: it failed.

    torchrun's script fails now and then in its own exit: that turn is left out, and said. Our own
    command may not fail.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        began = time.perf_counter()
        ended = subprocess.run(
            command,
            cwd=home,
            check=name.startswith("samecurve"),
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        )
        if ended.returncode:
            print(f"{name}: exit code {ended.returncode}; this turn of it is left out")
            return math.nan
        return time.perf_counter() - began


def measure(turns: int) -> Mapping[str, list[float]]:
    """Seconds from each command to its end, once a turn; the first turn warms the file cache."""
    with tempfile.TemporaryDirectory() as home:
        script = Path(home) / "two_steps.py"
        script.write_text(_SCRIPT)
        sides = {name: partial(_seconds, name, line) for name, line in _commands(script).items()}
        alternate(sides, 1)
        return alternate(sides, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    seconds = measure(parser.parse_args().turns)
    ratios = {
        f"{ours} beside {other}": _ratio(seconds[ours], seconds[other])
        for ours, other in _BESIDE.items()
    }
    kept = {
        name: [None if math.isnan(each) else each for each in times]
        for name, times in seconds.items()
    }
    publish("start", {"seconds": kept, "ratios": ratios})


def _ratio(ours: Sequence[float], other: Sequence[float]) -> float | None:
    """The median ratio over the turns that both sides finished; None: there is none."""
    both = [(a, b) for a, b in zip(ours, other, strict=True) if not math.isnan(a + b)]
    if not both:
        return None
    return paired([a for a, _ in both], [b for _, b in both], lambda a, b: a / b)


if __name__ == "__main__":
    main()
