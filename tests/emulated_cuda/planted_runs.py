"""Trains small runs with planted faults, by warm processes, and writes what was seen of each.

test_planted_faults.py starts it as `python -m planted_runs ANSWERS WHICH`, where WHICH is sharp,
other, all, or the names of faults. ANSWERS gets what `samecurve rehearse` would show of each run,
and of the same runs without faults.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import planted_collectives  # noqa: F401 - its faults join the others
import planted_faults  # noqa: F401 - as above
from faults_and_runs import FAULTS, Fault

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.planner import plan as make_plan
from samecurve.experiments.scratch import make_run, run_on_ranks
from samecurve.launch.pool import JobFailedError, Pool, pool
from samecurve.probe import probe
from samecurve.run.directory.attempt import Attempt, Requests
from samecurve.tasks import Tasks, open_task
from samecurve.worker.context import RankContext
from samecurve.worker.join import join_warm
from samecurve.worker.rank_main import train_rank
from samecurve_products.rehearse.child import Ended
from samecurve_products.rehearse.failure import failure_of_script, with_failure
from samecurve_products.rehearse.rehearsal import Finding
from samecurve_products.rehearse.report_files import Report


@dataclass(frozen=True)
class Answer:
    """What a rehearsal would show of a run.

    error: the end of its traceback; '': it came through. kind, place: what must be found, and the
    line that must be named; '': nothing. control: the name of the same run without the fault.
    """

    findings: Sequence[Finding]
    error: str
    run: str = ""
    kind: str = ""
    place: str = ""
    control: str = ""


class ReportsOfRuns:
    """The reports of runs that the same processes train one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[str, int]()

    def read(self, directory: Path) -> Report:
        """What all processes have reported since the last call, with steps counted from 1.

        directory: a new one, for the files of this report
        """
        directory.mkdir(parents=True)
        for path in self._folder.glob("*.jsonl"):
            text = path.read_text()
            rows = [json.loads(line) for line in text[self._read.get(path.name, 0) :].splitlines()]
            self._read[path.name] = len(text)
            before = min((row["step"] - 1 for row in rows if row["row"] == "step"), default=0)
            for row in rows:
                if row["row"] == "step":
                    row["step"] -= before
            (directory / path.name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Report(directory)


def train_planted(index: int, group: Any, attempt: str, fault: str) -> None:
    """Train as a rank, with a fault. fault: '': without"""
    with ExitStack() as replaced:

        def put(owner: Any, name: str, part: Any) -> None:
            replaced.enter_context(patch.object(owner, name, part))

        plant = FAULTS[fault].plant if fault else None
        if plant:
            plant(put)
        context = RankContext.read_warm(attempt, index)
        task = open_task(context.config, str(context.run.home.parent / "cache"))
        session = join_warm(context.plan, index, group)
        train_rank(
            context, session.make_engine(task, context.config.optimizer), task, Requests(None)
        )


def train(values: Mapping[str, Any], fault: str, home: Path, ranks: Pool) -> str:
    """Train a run with a fault. Returns the traceback that ended it; '': none did."""
    config = load_document(Document(dict(values)), Tasks()).config
    task = open_task(config, str(home.parent / "cache"))
    made = make_plan(config, probe(), task.facts())
    make_run(home, config, made)
    attempt = Attempt("test", str(home), None, None).to_json()
    dies = bool(fault) and FAULTS[fault].kind == "host_read"
    is_alone = made.layout.world_size == 1 and not dies
    try:
        if is_alone:
            train_planted(0, None, attempt, fault)
        else:
            run_on_ranks(ranks, made, train_planted, attempt, fault)
    except JobFailedError as error:
        return error.trace or str(error)
    except Exception:
        return traceback.format_exc()
    return ""


def chosen(which: Sequence[str]) -> dict[str, Fault]:
    """The faults by name."""
    if which == ["all"]:
        return FAULTS
    if which in (["sharp"], ["other"]):
        sharp = which == ["sharp"]
        return {name: fault for name, fault in FAULTS.items() if fault.sharp == sharp}
    return {name: FAULTS[name] for name in which}


def main(answers: Path, which: Sequence[str]) -> None:
    """Train the runs without faults and then each fault; write what was seen of each."""
    home = answers.parent
    reports = ReportsOfRuns(Path(os.environ["EMULATED_CUDA_REPORT"]))
    faults = chosen(which)
    controls = dict(fault.control for fault in faults.values())
    runs = {name: ("", values) for name, values in controls.items()}
    runs |= {name: (name, fault.values) for name, fault in faults.items()}
    results = {}
    with pool(2, answers.with_suffix(".log"), patience=60) as ranks:
        for name, (fault, values) in runs.items():
            error = train(values, fault, home / name, ranks)
            report = reports.read(home / name / "report")
            findings = [*report.findings()]
            if error:
                findings = with_failure(
                    failure_of_script(Ended(1, error), report.steps + 1), findings
                )
            answer = Answer(findings, error[-3000:])
            if fault:
                of = faults[fault]
                control, _ = of.control
                answer = replace(answer, run=of.run, kind=of.kind, place=of.place, control=control)
            results[name] = asdict(answer)
            answers.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
