"""A job of the fault campaign: a small run that faults happen to, in a directory of its own, and
what must be true of it in the end.
"""

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from planted import Fired, Plant

from commands import command, losses
from samecurve.checkpoint.format import load
from samecurve.checkpoint.store import checkpoints, newest
from samecurve.core.events import Event
from samecurve.observe import event_of
from samecurve.run.directory import Run

HERE = Path(__file__).parent
SAVE = 5  # steps between two saves
TOLERANCE = 1e-12
_SILENT = 240.0  # seconds without any sign of a command that hangs
_GONE = 10.0  # seconds in which the processes of a run that was killed are gone
CONFIG = """\
task: {task}:Task
model: {{}}
data: {data}
batch: {{samples: 10}}
optimizer: {{lr: 1.0e-2, clip: 0.5}}
schedule: {{warmup: 5}}
train:
  {{steps: {steps}, precision: f64, save_every: {save}, eval_every: {save}, keep: 2, log_every: 50}}
devices: {{use: "cpu:2", hang_floor: {floor}, max_restarts: {restarts}}}
track: {{sensors_every: 0}}
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    kind: str  # the row of the table
    what: str  # the fault
    recovered: bool
    lost_steps: int | None = None  # trained twice; None: nothing had to be trained again
    seconds: float | None = None  # until the next finished step; None: training never stood still
    note: str = ""  # why it was not recovered


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    text: str  # its output and errors


class ChaosError(AssertionError):
    """A run is not what it should be after a fault."""


@dataclass
class Job:
    """A run in a directory of its own."""

    home: Path
    steps: int
    kind: str  # the row of the table that its faults belong to
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    output: str = "output.txt"  # the file that the command prints to

    def __post_init__(self) -> None:
        self.home.mkdir(exist_ok=True)
        self.write_config()

    def beside(self) -> "Job":
        """The same job, for another command at the same time."""
        return replace(self, output="beside.txt")

    def write_config(self, **changes: Any) -> None:
        values = {"data": "{}", "floor": 60, "restarts": 0, **self.options, **changes}
        text = CONFIG.format(task=HERE / "chaos_task.py", steps=self.steps, save=SAVE, **values)
        (self.home / "own.yaml").write_text(text)

    def plant(self, plants: Sequence[Plant]) -> None:
        values = [asdict(plant) for plant in plants]
        (self.home / "plants.json").write_text(json.dumps(values))

    def fired(self, number: int) -> Fired | None:
        """What a planted fault left; None: it has not happened."""
        path = self.home / f"fired-{number}.json"
        return Fired(**json.loads(path.read_text())) if path.exists() else None

    @property
    def run(self) -> Path:
        return self.home / "run"

    def words(self, *more: object) -> list[str]:
        return command("train", "-f", "own.yaml", "--save-dir", "run", *more)

    @cached_property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CHAOS_HOME": str(self.home), **self.environment}

    @contextmanager
    def live(
        self, *more: object, words: Sequence[str] = (), timeout: float = _SILENT
    ) -> Iterator["Live"]:
        """The command while it runs; killed after the block, if it is still there."""
        with open(self.home / self.output, "wb") as output:
            process = subprocess.Popen(
                words or self.words(*more),
                cwd=self.home,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Live(self, process, timeout)
        finally:
            process.kill()
            process.wait()

    def train(self, *more: object, words: Sequence[str] = ()) -> Ended:
        """Run the command to its end."""
        with self.live(*more, words=words) as live:
            return live.end()

    def finish(self, *more: object) -> Ended:
        """Run the command to its end, which must be a good one."""
        ended = self.train(*more)
        require(ended.code == 0, f"exit code {ended.code}: {ended.text[-1500:]}")
        return ended

    # what is known of the run

    def lines(self) -> list[Event]:
        """The lines of the journal, those that a later resume made void too."""
        try:
            lines = (self.run / "journal.jsonl").read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [event for line in lines if (event := event_of(line))]

    def steps_done(self) -> int:
        return max((event.step for event in self.lines() if event.kind == "step"), default=0)

    def last_saved(self) -> int:
        return max(
            (
                int(path.name.removeprefix("step-"))
                for path in checkpoints(self.run / "checkpoints")
            ),
            default=0,
        )

    def ranks(self) -> dict[int, int]:
        """The process ids of the ranks that live, by rank; nobody may have waited for dead ones."""
        if not self.run.exists():
            return {}
        found = {}
        for rank, pid in Run(self.run).processes().items():
            with suppress(psutil.Error):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found[rank] = pid
        return found

    def processes(self) -> list[psutil.Process]:
        """The processes of this job: their working directory is its home."""
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if Path(os.readlink(f"/proc/{process.pid}/cwd")) == self.home:
                    found.append(process)
        return found

    # what must be true

    def check_no_orphans(self) -> None:
        """ChaosError: a process of the run has stayed behind."""
        deadline = time.monotonic() + _GONE
        while left := self.processes():
            if time.monotonic() > deadline:
                names = [" ".join(process.cmdline())[:200] for process in left]
                raise ChaosError(f"orphans: {names}")
            time.sleep(0.05)

    def check_equal(self, other: Path) -> None:
        """The losses of all steps and the last parameters are those of the unfailed run."""
        # the loss of a step that was skipped is None
        ours, theirs = (np.array(losses(run), np.float64) for run in (self.run, other))
        require(len(ours) == self.steps, f"{len(ours)} steps of {self.steps} in the journal")
        equal = np.isclose(ours, theirs, rtol=TOLERANCE, atol=0, equal_nan=True)
        require(equal.all(), f"the curve differs from step {np.argmin(equal) + 1} on")
        (own, damaged), (unfailed, _) = newest(self.run / "checkpoints"), newest_of(other)
        require(own is not None and unfailed is not None, f"no whole checkpoint: {damaged}")
        assert own is not None
        assert unfailed is not None
        arrays, expected = load(own).arrays, load(unfailed).arrays
        require(set(arrays) == set(expected), "other arrays")
        for name in expected:
            same = np.allclose(arrays[name], expected[name], rtol=TOLERANCE, atol=TOLERANCE)
            require(same, f"{name} differs from the unfailed run's")

    def check_undamaged(self) -> None:
        """ChaosError: a checkpoint was found damaged, and nobody had damaged it."""
        for event in self.lines():
            text = str(event.values.get("text"))
            if event.kind == "warned" and " is damaged: " in text:
                raise ChaosError(text)

    def seconds_after(self, moment: float, since: int = 0) -> float:
        """Seconds from a moment to the next finished step, or to the end of a run that had none.

        since: only lines from this one on count
        """
        for event in self.lines()[since:]:
            if event.kind in {"step", "finished"} and event.time > moment:
                return event.time - moment
        raise ChaosError("no step was finished after the fault")

    def add(self, what: str, lost: int | None, seconds: float | None, kind: str = "") -> None:
        self.outcomes.append(Outcome(kind or self.kind, what, True, lost, seconds))


@dataclass
class Live:
    """A command that runs."""

    job: Job
    process: "subprocess.Popen[bytes]"
    timeout: float

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, as long as the command lives."""
        deadline = time.monotonic() + self.timeout
        while not condition():
            require(self.process.poll() is None, f"it has ended: {self.text()[-1500:]}")
            require(time.monotonic() < deadline, "it did not come to that")
            time.sleep(0.01)

    def end(self) -> Ended:
        """Wait for the end, however long it takes, as long as there are new lines and faults."""
        seen = self._signs()
        while True:
            try:
                self.process.wait(self.timeout)
                return Ended(self.process.returncode, self.text())
            except subprocess.TimeoutExpired:
                seen, before = self._signs(), seen
                require(seen != before, f"it hangs: {self.text()[-1500:]}")

    def _signs(self) -> tuple[str, int, int]:
        """What grows while the command gets on: its output, the journal, the faults."""
        return self.text(), len(self.job.lines()), len([*self.job.home.glob("fired-*")])

    def text(self) -> str:
        return (self.job.home / self.job.output).read_text(errors="replace")


class Lab:
    """Where the campaign's jobs are."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self._jobs = 0
        self._unfailed: dict[tuple[Any, ...], Path] = {}

    def chance(self, name: str) -> random.Random:
        """Random numbers of a family, the same in each campaign with this seed."""
        return random.Random(f"{self.seed} {name}")

    def job(self, kind: str, steps: int, **options: Any) -> Job:
        self._jobs += 1
        environment = options.pop("environment", {})
        return Job(self.root / f"job-{self._jobs}", steps, kind, options, environment)

    def unfailed(self, steps: int, data: str = "{}", *flags: object) -> Path:
        """A run that nothing happened to, in one process."""
        key = (steps, data, *flags)
        if key not in self._unfailed:
            job = self.job("", steps, data=data)
            job.finish("--devices", "cpu", *flags)
            self._unfailed[key] = job.run
        return self._unfailed[key]


def newest_of(run: Path) -> tuple[Path | None, list[str]]:
    return newest(run / "checkpoints")


def require(condition: bool | np.bool, otherwise: str) -> None:  # noqa: FBT001 - reads as an assertion
    """ChaosError: the condition does not hold."""
    if not condition:
        raise ChaosError(otherwise)
