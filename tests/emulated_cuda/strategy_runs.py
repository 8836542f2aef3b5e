"""Trains small runs on emulated GPUs, one after another, by warm ranks: torch is imported once.

test_strategies_on_gpus.py starts it as `python -m strategy_runs CASES ANSWERS`. CASES, in
JSON, holds runs by name: each is a list of legs, which follow each other in one run directory. A
leg has `values` of a config and, where another leg follows, the step `stop_at`. With `shares_gpu`
all its ranks compute on the first GPU. ANSWERS gets what each run gave, or the words in which it
was refused.
"""

import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.planner import plan as make_plan
from samecurve.core.protocols import Engine
from samecurve.errors import UserError
from samecurve.experiments.scratch import make_run, run_on_ranks
from samecurve.launch.pool import JobFailedError, Pool, pool
from samecurve.observe import read_events
from samecurve.probe import probe
from samecurve.run.directory.attempt import Attempt, Requests
from samecurve.tasks import Tasks, open_task
from samecurve.worker.context import RankContext
from samecurve.worker.join import join_warm
from samecurve.worker.rank_main import train_rank

RANKS = 4
STEADY = 3  # what is counted: from the start of this step to that of the next one


@dataclass(frozen=True)
class Answer:
    """What a run gave.

    curve: losses and gradient norms, step by step. evaluated: what evaluations gave.
    hash: of the last state; '': not exact.
    findings: kind, text and lines. left: bytes on GPUs that the run before left there.
    launches, syncs: of a steady step, of the process that made the most; -1: the run was too
    short. syncs_at: the lines of those. memory, estimate: bytes of the fullest device, from the
    first step on; the split check before it looks for free memory itself. refused: the error,
    where there was one.
    """

    curve: Sequence[float] = ()
    evaluated: Sequence[float] = ()
    hash: str = ""
    findings: Sequence[str] = ()
    left: int = 0
    launches: int = -1
    syncs: int = -1
    syncs_at: Sequence[str] = ()
    memory: int = 0
    estimate: int = 0
    refused: str = ""


def train_counted(index: int, group: Any, attempt: str) -> dict[str, Any]:
    """Train as a rank; what the emulator counted and found in this process meanwhile."""
    import torch

    # isort: split
    import emulated_cuda_native as native  # after torch, which brings it

    gc.collect()  # the engine of the run before, whose memory would count as this run's
    left = sum(native.memory(gpu)[0] for gpu in range(torch.cuda.device_count()))
    known = {_lines(row) for row in native.reports()}
    native.count(True)
    context = RankContext.read_warm(attempt, index)
    task = open_task(context.config, str(context.run.home.parent / "cache"))
    engine = join_warm(context.plan, index, group).make_engine(task, context.config.optimizer)
    starts = _note_starts(engine, native)
    train_rank(context, engine, task, Requests(None))
    native.count(False)
    rows = [row for row in native.reports() if _lines(row) not in known]
    found = [f"{row['kind']}: {row['text']} {row['here'][:2]}" for row in rows]
    return {"findings": found, "left": left, **_steady(starts)}


def _reset_peaks(native: Any) -> None:
    for gpu in range(native.device_count()):
        native.reset_peak(gpu)


def _lines(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells one finding from another."""
    return (row["kind"], *row["here"], "", *row["there"])


def _note_starts(engine: Engine, native: Any) -> list[dict[str, Any]]:
    """What has been counted as each step starts, from now on."""
    starts: list[dict[str, Any]] = []
    begin = engine._begin_steps  # type: ignore[attr-defined]

    def begun(*arguments: Any, **options: Any) -> None:
        begin(*arguments, **options)
        step = engine.step

        def noted(*arguments: Any) -> Any:
            if not starts:
                _reset_peaks(native)
            starts.append(native.counts())
            return step(*arguments)

        engine.step = noted  # type: ignore[method-assign, assignment]

    engine._begin_steps = begun  # type: ignore[attr-defined]
    return starts


def _steady(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(starts) <= STEADY:
        return {}
    before, after = starts[STEADY - 1], starts[STEADY]
    at = [
        line for line, count in after["sync_at"].items() if count > before["sync_at"].get(line, 0)
    ]
    return {
        "launches": sum(after["launches"].values()) - sum(before["launches"].values()),
        "syncs": after["syncs"] - before["syncs"],
        "syncs_at": at,
    }


def train_legs(legs: Sequence[Mapping[str, Any]], home: Path, ranks: Pool) -> Answer:
    """Train a run on as many devices as each leg says."""
    machine, checkpoint, fixed, parts = probe(), None, None, []
    for leg in legs:
        config = load_document(Document(dict(leg["values"])), Tasks()).config
        task = open_task(config, str(home.parent / "cache"))
        made = make_plan(config, machine, task.facts(), fixed)
        if leg.get("shares_gpu"):
            gpus = (made.layout.devices[0],) * made.layout.num_devices
            made = replace(made, layout=replace(made.layout, devices=gpus))
        run, stop_at = make_run(home, config, made), leg.get("stop_at")
        attempt = Attempt("test", str(home), checkpoint, stop_at)
        parts += run_on_ranks(ranks, made, train_counted, attempt.to_json())
        checkpoint, fixed = str(run.checkpoints / f"step-{stop_at or 0:08d}"), made.fixed
    events = read_events(home / "journal.jsonl")
    ends = [event.values for event in events if event.kind == "finished"]
    most = max(parts, key=lambda part: part.get("launches", -1))
    return Answer(
        curve=[
            event.values[name]
            for event in events
            if event.kind == "step"
            for name in ("loss", "grad_norm")
        ],
        evaluated=[
            value
            for event in events
            if event.kind == "evaluated"
            for name, value in sorted(event.values.items())
            if isinstance(value, float) and name != "seconds"
        ],
        hash=["", *(event.values["hash"] for event in events if "hash" in event.values)][-1],
        findings=[finding for part in parts for finding in part["findings"]],
        launches=most.get("launches", -1),
        syncs=max(part.get("syncs", -1) for part in parts),
        syncs_at=[line for part in parts for line in part.get("syncs_at", ())],
        left=max(part["left"] for part in parts),
        memory=max(ends[-1].get("memory_bytes_by_device", [0])),
        estimate=ends[-1].get("memory_estimate_bytes", 0),
    )


def main(cases: Path, answers: Path) -> None:
    """Train all runs of a file, and write what they gave."""
    given = json.loads(cases.read_text())
    results = {}
    with pool(RANKS, answers.with_suffix(".log"), patience=120) as ranks:
        for name, legs in given.items():
            try:
                answer = train_legs(legs, answers.parent / name, ranks)
            except (UserError, JobFailedError) as error:
                answer = Answer(refused=f"{error.cause} -> {error.remedy}")
            results[name] = asdict(answer)
            answers.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
