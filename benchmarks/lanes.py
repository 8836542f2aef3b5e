"""One CPU rank on all cores: an exact run in lanes, beside an ordinary run, whose operations share
out the cores.

Both train the same batches in one process, step by step in turn; seconds are the clock's. Idle
threads wait as in a run of samecurve. Writes
benchmarks/results/lanes-<machine>.json unless --no-keep.
Run: python -m benchmarks.lanes [--steps 20] [--models "har;..."] [--no-keep]
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import paired
from benchmarks.exact import Runner
from benchmarks.exact_cost import IN, MODELS, WARM, seconds_in_turn, values_of
from benchmarks.page import publish
from samecurve.cli.main import let_threads_wait
from samecurve.probe import cpu_name
from samecurve.torch_engine.strategies.exact import set_deterministic

CHOSEN = [name for name in MODELS if name != "digits" and not IN.search(name)]


def race(values: Mapping[str, Any], home: Path, steps: int, cores: int) -> dict[str, Any]:
    """Train in both modes, step by step in turn."""
    threads = {"ordinary": cores, "exact": 1}
    runners = {}
    for mode, count in threads.items():
        torch.set_num_threads(count)
        train = {**values["train"], "exact": mode == "exact"}
        runners[mode] = Runner({**values, "train": train}, home, cores=cores)
        assert runners[mode].plan.compute.threads == count
    lanes = runners["exact"].plan.compute.lanes

    def prepare(mode: str) -> None:
        set_deterministic(mode == "exact")
        torch.set_num_threads(threads[mode])

    seconds = seconds_in_turn(runners, steps, prepare)
    batch = runners["exact"].plan.batch
    return {
        "lanes": lanes,
        "samples": batch.global_batch_size,
        "microbatch": batch.micro_batch_size,
        "ratio": paired(seconds["exact"], seconds["ordinary"], lambda a, b: a / b),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--models", default=";".join(CHOSEN), help="names with ; between them")
    parser.add_argument("--no-keep", action="store_true")
    given = parser.parse_args()
    if "GOMP_SPINCOUNT" not in os.environ:  # read as torch is imported
        let_threads_wait()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.lanes", *sys.argv[1:]])
    cores = len(os.sched_getaffinity(0))
    models = {}
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        (home / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(200_000)))
        for name in given.models.split(";"):
            values = values_of(name, home / "text.txt", WARM + given.steps)
            values["devices"] = {"use": "cpu"}
            one = models[name] = race(values, home, given.steps, cores)
            print(f"{name}: {one['lanes']} lanes, ratio {one['ratio']:.3f}", flush=True)
    publish("lanes", {"models": models}, machine=cpu_name(), is_kept=not given.no_keep)


if __name__ == "__main__":
    main()
