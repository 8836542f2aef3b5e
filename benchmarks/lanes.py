"""One CPU rank on all cores: an exact run in lanes, beside an ordinary run, whose operations share
out the cores.

Both train the same batches, step by step in turn, each in a process of its own: in one process
ordinary steps become slower after exact ones. Seconds are the clock's. Idle threads wait as in a
run of samecurve. Writes benchmarks/results/lanes-<machine>.json unless --no-keep.
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
from benchmarks.exact_cost import IN, MODELS, WARM, values_of
from benchmarks.page import publish
from samecurve.cli.main import let_threads_wait
from samecurve.launch.pool import pool
from samecurve.probe import cpu_name
from samecurve.torch_engine.strategies.exact import set_deterministic

CHOSEN = [name for name in MODELS if name != "digits" and not IN.search(name)]
# more lanes than two cores: a core has no whole number of microbatches
CHOSEN += ["decoder 128x4, 8 x 256 tokens, in 3", "decoder 256x6, 4 x 256 tokens, in 3"]


_RUNNERS: list[Runner] = []  # of a rank: its only one


def begin(
    _index: int, _group: Any, values: Mapping[str, Any], home: Path, cores: int
) -> dict[str, int]:
    """Begin to train in this rank. Returns what was planned."""
    exact = values["train"]["exact"]
    torch.set_num_threads(1 if exact else cores)
    set_deterministic(exact)
    _RUNNERS[:] = [Runner(values, home, cores=cores)]
    plan = _RUNNERS[0].plan
    assert plan.compute.threads == torch.get_num_threads()
    return {
        "lanes": plan.compute.lanes,
        "samples": plan.batch.global_batch_size,
        "microbatch": plan.batch.micro_batch_size,
    }


def step(_index: int, _group: Any) -> float:
    return _RUNNERS[0].step()


def race(values: Mapping[str, Any], home: Path, steps: int, cores: int) -> dict[str, Any]:
    """Train in both modes, step by step in turn, each in a process of its own."""
    seconds: dict[str, list[float]] = {"ordinary": [], "exact": []}
    with pool(1, home / "ordinary.log", 1800) as one, pool(1, home / "exact.log", 1800) as other:
        ranks = {"ordinary": one, "exact": other}
        for mode, pool_of_mode in ranks.items():
            train = {**values["train"], "exact": mode == "exact"}
            [planned] = pool_of_mode.run(1, begin, {**values, "train": train}, home, cores)
        for number in range(WARM + steps):
            for mode, pool_of_mode in ranks.items():
                [took] = pool_of_mode.run(1, step)
                if number >= WARM:
                    seconds[mode].append(took)
    return {
        **planned,
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
