"""Shared parts of the benchmarks: runs of Samecurve in this process, turns, result files."""

import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.core.config.sections import Config
from samecurve.core.events import REQUESTS, Event
from samecurve.core.loop import LoopContext, train
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Engine, Task
from samecurve.data.feed import Feed
from samecurve.observe import Heartbeat, Journal
from samecurve.probe import cpu_name, probe
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import ControlFile
from samecurve.worker.jobs.train_job import Unsaved

UNASKED = (0,) * len(REQUESTS)  # requests to the ranks in a step: none
RESULTS = Path(__file__).parent / "results"
_SHOWN = ("torch", "accelerate", "lightning", "transformers", "jax", "torchao")


def trained(
    engine: Engine,
    task: Task,
    made: Plan,
    home: Path,
    record: Callable[[Event], None] = lambda _event: None,
    *,
    store: Any = None,
    rank: int = 0,
) -> Any:
    """Run one rank as the worker does, with feed, journal, heartbeat and requests.

    record: is called with each event, too

    Returns the state.
    """
    run = Run(home)
    run.logs.mkdir(parents=True, exist_ok=True)
    feed = Feed(made, made.layout.devices_of(rank), task.train_data(), None, engine.stage)
    journal = Journal(run.journal)

    def both(event: Event) -> None:
        journal.record(event)
        record(event)

    try:
        context = LoopContext(
            plan=made,
            engine=engine,
            feed=feed,
            store=store or Unsaved(),
            record=both,
            heartbeat=Heartbeat(run.logs / "heartbeat-0"),
            requests=ControlFile(run, "benchmark"),
            summarize=task.summarize,
            keep_pictures=lambda _step, _pictures: [],
        )
        state, _ = train(context)
    finally:
        feed.close()
        engine.close()
        journal.close()
    return state


def timed(engine: Engine, task: Task, made: Plan, home: Path, warm: int) -> float:
    """Median seconds of a run's steps, without its first `warm` steps."""
    times: list[float] = []
    trained(
        engine,
        task,
        made,
        home,
        lambda event: times.append(time.perf_counter()) if event.kind == "step" else None,
    )
    return statistics.median(b - a for a, b in pairwise(times[warm:]))


class Gaps:
    """The times at which steps ended.

    seconds() is the median over blocks of steps. So work that comes every few steps counts, and a
    short disturbance by other programs does not.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._times: list[float] = []

    def mark(self, event: Event | None = None) -> None:
        if event is None or event.kind == "step":
            self._times.append(time.perf_counter())

    def seconds(self, warm: int) -> float:
        ends = self._times[warm :: self._block]
        return statistics.median((b - a) / self._block for a, b in pairwise(ends))


def alternate(sides: Mapping[str, Callable[[], float]], times: int) -> dict[str, list[float]]:
    """Run each side in turn, `times` times.

    Every other turn goes backwards, so that no side profits from warming up during a turn.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(times):
        order = list(sides)[:: 1 if turn % 2 == 0 else -1]
        for name in order:
            found[name].append(sides[name]())
    return found


def paired(
    ours: Sequence[float], other: Sequence[float], compare: Callable[[float, float], float]
) -> float:
    """The median over turns of a comparison of two sides."""
    return statistics.median(compare(a, b) for a, b in zip(ours, other, strict=True))


def installed(names: Iterable[str]) -> dict[str, str]:
    """The versions of those libraries that are installed."""
    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine_of(machine: Machine) -> str:
    return machine.devices[0].name if machine.devices else cpu_name()


def file_name(words: str) -> str:
    """The words in characters that a file name may have."""
    return re.sub("[^A-Za-z0-9]+", "-", words).strip("-").lower()


def spread(curves: Sequence[Sequence[float]]) -> float:
    """The largest difference between any two curves at any step."""
    return float(np.ptp(np.asarray(curves, np.float64), axis=0).max())


def run_ranks(world: int, module: str, *arguments: str) -> None:
    """Run a module in `world` processes, started by torch's launcher if there are several."""
    start = [sys.executable]
    if world > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*start, "-m", module, *arguments],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            f"{' '.join(arguments)} on {world} ranks failed:\n{done.stdout[-2000:]}\n"
            f"{done.stderr[-4000:]}"
        )


def write(name: str, result: Mapping[str, Any], machine: str | None = None) -> Path:
    """Write benchmarks/results/NAME-MACHINE.json, with the machine and the versions."""
    here = probe()
    where = machine or machine_of(here)
    said = {
        "machine": where,
        "cores": here.cores,
        "python": platform.python_version(),
        "versions": installed(_SHOWN),
        **result,
    }
    place = RESULTS / f"{name}-{file_name(where)}.json"
    place.write_text(json.dumps(said, indent=1) + "\n")
    return place


def config_of(values: Mapping[str, Any]) -> Config:
    from samecurve.core.config.document import Document
    from samecurve.core.config.loading import load_document
    from samecurve.tasks import Tasks

    return load_document(Document(dict(values)), Tasks()).config
