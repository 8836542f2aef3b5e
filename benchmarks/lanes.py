"""One CPU rank on all cores: an exact run in lanes, beside an ordinary run, whose operations share
out the cores.

Some exact runs have more lanes, or more threads, than the machine has cores: the latter are planned
as for a machine with more cores. Both sides train the same batches, step by step in turn, each in a
process of its own: in one process ordinary steps become slower after exact ones. Seconds are the
clock's. Idle threads wait as in a run of samecurve. Writes benchmarks/results/lanes-<machine>.json
unless --no-keep.
Run: python -m benchmarks.lanes [--steps 20] [--models "har;..."] [--no-keep]
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import paired
from benchmarks.exact import Runner
from benchmarks.exact_cost import IN, MODELS, WARM, language, values_of
from benchmarks.page import publish
from samecurve.cli.main import let_threads_wait
from samecurve.launch.pool import pool
from samecurve.probe import cpu_name
from samecurve.torch_engine.strategies.exact import set_deterministic

CHOSEN: dict[str, Mapping[str, Any] | str] = {
    **{name: of for name, of in MODELS.items() if name != "digits" and not IN.search(name)},
    "decoder 128x4, 22 x 256 tokens, in 3": language(128, 4, 256, 64),
    "decoder 256x6, 11 x 256 tokens, in 3": language(256, 6, 256, 32),
    "decoder 128x4, 32 x 256 tokens, as on 3 cores, in 2": language(128, 4, 256, 64),
    "decoder 256x6, 16 x 256 tokens, as on 3 cores, in 2": language(256, 6, 256, 32),
}
AS = re.compile(r", as on (\d+) cores")


_RUNNERS: list[Runner] = []  # of a rank: its only one


def begin(
    _index: int, _group: Any, values: Mapping[str, Any], home: Path, cores: int
) -> dict[str, int]:
    """Begin to train in this rank. Returns what was planned."""
    set_deterministic(values["train"]["exact"])
    _RUNNERS[:] = [Runner(values, home, cores=cores)]
    plan = _RUNNERS[0].plan
    torch.set_num_threads(plan.compute.threads)
    return {
        "lanes": plan.compute.lanes,
        "threads": plan.compute.threads,
        "samples": plan.batch.global_batch_size,
        "microbatch": plan.batch.micro_batch_size,
    }


def step(_index: int, _group: Any) -> float:
    return _RUNNERS[0].step()


def race(
    values: Mapping[str, Any], home: Path, steps: int, cores: int, as_on: int
) -> dict[str, Any]:
    """Train in both modes, step by step in turn, each in a process of its own.

    as_on: cores of the machine that exact runs are planned for
    """
    seconds: dict[str, list[float]] = {"ordinary": [], "exact": []}
    with pool(1, home / "ordinary.log", 1800) as one, pool(1, home / "exact.log", 1800) as other:
        ranks = {"ordinary": one, "exact": other}
        for mode, pool_of_mode in ranks.items():
            train = {**values["train"], "exact": mode == "exact"}
            for_cores = as_on if mode == "exact" else cores
            [planned] = pool_of_mode.run(1, begin, {**values, "train": train}, home, for_cores)
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
            values = values_of(name, home / "text.txt", WARM + given.steps, CHOSEN)
            values["devices"] = {"use": "cpu"}
            as_on = AS.search(name)
            for_cores = int(as_on.group(1)) if as_on else cores
            one = models[name] = race(values, home, given.steps, cores, for_cores)
            said = f"{one['lanes']} lanes of {one['threads']}, ratio {one['ratio']:.3f}"
            print(f"{name}: {said}", flush=True)
    publish("lanes", {"models": models}, machine=cpu_name(), is_kept=not given.no_keep)


if __name__ == "__main__":
    main()
