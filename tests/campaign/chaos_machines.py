"""Faults between two machines: a rank, a whole machine, the network, another config or code."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from chaos_commands import trial
from chaos_jobs import HERE, SAVE, ChaosError, Job, Lab, Outcome, require

from machines import Machine, machines, run
from samecurve.errors import START_AGAIN
from samecurve.observe import read_beat

_PORT = 29500
_WAIT = 120.0  # seconds in which two machines have met and train
_STEPS, _LONG = 700, 2000  # a machine that comes back imports its libraries meanwhile
_PARTITION = 12  # seconds
_FLOOR = 10  # of devices.hang_floor: where a machine is gone without a word, the hang watch sees it


def are_possible() -> str:
    """Why there can be no machines here; '': there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare", "nft", "tc") if not shutil.which(name)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "network namespaces can't be made here" if made.returncode else ""


class Pair:
    """Two machines that train one job."""

    def __init__(self, job: Job, nodes: list[Machine], hosts: str) -> None:
        self.job, self.nodes, self._hosts = job, nodes, hosts
        self.processes = [self._start(node) for node in nodes]

    def _start(self, node: Machine) -> "subprocess.Popen[str]":
        place = f"{self.nodes[0].address}:{_PORT}"
        flags = ("--nnodes", self._hosts, "--rdzv", place, "--devices", "cpu")
        words = self.job.words(*flags, "--max-restarts", 20)
        return node.start_command(words, cwd=self.job.home, env={"CHAOS_HOME": str(self.job.home)})

    def come_back(self, index: int) -> None:
        """The machine is there again, and somebody gives its command again."""
        self.nodes[index].mend()
        self.processes[index] = self._start(self.nodes[index])

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + _WAIT
        while not condition():
            ended = self.processes[0].poll()
            require(ended is None, f"it has ended with {ended}: {self._said(0)}")
            require(time.monotonic() < deadline, "it did not come to that")
            time.sleep(0.02)

    def train_on(self, steps: int) -> None:
        """Train for so many steps."""
        goal = self.job.steps_done() + steps
        self.until(lambda: self.job.steps_done() >= goal)

    def until_step_after(self, moment: float) -> float:
        """Wait for a step of the next start. Returns when it was finished."""

        def steps() -> list[float]:
            lines = self.job.lines()
            starts = [n for n, e in enumerate(lines) if e.kind == "started" and e.time > moment]
            since = starts[0] if starts else len(lines)
            return [event.time for event in lines[since:] if event.kind == "step"]

        self.until(steps)
        return steps()[0]

    def end(self) -> None:
        for index, process in enumerate(self.processes):
            try:
                code = process.wait(_WAIT)
            except subprocess.TimeoutExpired:
                raise ChaosError(f"node{index} hangs") from None
            require(code == 0, f"node{index} left with {code}: {self._said(index)}")

    def _said(self, index: int) -> str:
        stdout = self.processes[index].stdout
        assert stdout is not None
        return stdout.read()[-1500:] if self.processes[index].poll() is not None else ""

    def fault(self, what: str, happen: Callable[[], object], kind: str) -> None:
        """Something happens that ends this start; the run goes on from its last save."""
        done = self._done()
        moment = time.time()
        happen()
        trained = self.until_step_after(moment)
        lost = self._lost(done, moment)
        require(lost is not None, "it did not resume")
        self.job.add(what, lost, trained - moment, kind)

    def partition(self, index: int, kind: str) -> None:
        """The network of a machine is gone for a while, and the run starts again."""
        done = self._done()
        moment = time.time()
        self.nodes[index].cut()
        time.sleep(_PARTITION)
        self.nodes[index].mend()
        since = time.time()

        def steps() -> list[float]:
            self._again_if_ended()
            lines = self.job.lines()
            return [e.time for e in lines if e.kind == "step" and e.time > since]

        self.until(steps)
        self.job.add(
            f"the network of node{index}", self._lost(done, moment) or 0, steps()[0] - moment, kind
        )

    def _again_if_ended(self) -> None:
        """Give the second machine's command again, if it has lost the first, and said so."""
        code = self.processes[1].poll()
        if code is not None:
            said = self._said(1)
            require(code == START_AGAIN and "again" in said, f"node1 left with {code}: {said}")
            self.come_back(1)

    def _lost(self, done: int, moment: float) -> int | None:
        """The steps that the next start trains again; None: there was none since the moment.

        ChaosError: they are more than a fault may cost.
        """
        resumed = [e.step for e in self.job.lines() if e.kind == "resumed" and e.time > moment]
        if not resumed:
            return None
        begun = done // SAVE * SAVE  # the newest save that had begun
        require(begun - resumed[0] <= SAVE, f"{begun - resumed[0]} steps before the newest save")
        return max(done - resumed[0], 0)

    def _done(self) -> int:
        beat = read_beat(self.job.run / "logs/heartbeat-0")
        return beat.step if beat else 0

    def weather(self, what: str, kind: str) -> None:
        """The network is bad for some steps; nothing stops."""
        lines = len(self.job.lines())
        self.train_on(40)
        again = [e for e in self.job.lines()[lines:] if e.kind in {"restarted", "resumed"}]
        require(not again, f"it was started again: {again}")
        self.job.add(what, 0, None, kind)


@contextmanager
def losing_packets(node: Machine, percent: int) -> Iterator[None]:
    """The machine loses so many of the packets that reach it."""
    inside = ("ip", "netns", "exec", node.namespace, "nft")
    run(*inside, "add table inet chaos")
    run(*inside, "add chain inet chaos input { type filter hook input priority 0 ; }")
    run(*inside, f"add rule inet chaos input numgen random mod 100 < {percent} drop")
    try:
        yield
    finally:
        run(*inside, "delete table inet chaos")


@contextmanager
def narrow(node: Machine, rate: str) -> Iterator[None]:
    """The machine sends no faster than this."""
    inside = ("ip", "netns", "exec", node.namespace, "tc", "qdisc")
    shape = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
    run(*inside, "add", "dev", node.link, "root", *shape)
    try:
        yield
    finally:
        run(*inside, "del", "dev", node.link, "root")


def disturb_machines(lab: Lab) -> list[Outcome]:
    """Two machines, both needed: ranks die, the network is bad, and it is gone for 12 s."""
    job = lab.job("two machines", _STEPS, floor=_FLOOR)
    whats = [f"fault {number}" for number in range(7)]

    def happen() -> None:
        with machines(2, job.home) as nodes:
            pair = Pair(job, nodes, "2")
            pair.train_on(3 * SAVE)
            for index in (1, 0, 1):
                pair.fault(
                    f"the rank of node{index}",
                    partial(kill_ranks, nodes[index]),
                    "two machines: kill -9 of a rank",
                )
                pair.train_on(3 * SAVE)
            with losing_packets(nodes[1], 5):
                pair.weather("5 % of the packets", "two machines: packets lost, a slow network")
            with narrow(nodes[1], "20mbit"):
                pair.weather("20 Mbit/s", "two machines: packets lost, a slow network")
            for index in (1, 0):
                pair.partition(index, f"two machines: a partition of {_PARTITION} s")
                pair.train_on(3 * SAVE)
            pair.end()
        job.check_undamaged()
        job.check_equal(lab.unfailed(job.steps))

    return trial(job, whats, happen)


def kill_ranks(node: Machine) -> None:
    for pid in node.ranks():
        os.kill(pid, signal.SIGKILL)


def lose_machines(lab: Lab) -> list[Outcome]:
    """One or two machines: one is lost without a word, the other goes on; then it comes back."""
    job = lab.job("two machines: one is lost, and comes back", _LONG, floor=_FLOOR)
    whats = ["lost", "back", "lost again", "back again"]

    def happen() -> None:
        with machines(2, job.home) as nodes:
            pair = Pair(job, nodes, "1:2")
            pair.train_on(3 * SAVE)
            for lost, back in (whats[:2], whats[2:]):
                pair.fault(lost, nodes[1].power_off, job.kind)
                pair.processes[1].wait(10)
                pair.train_on(3 * SAVE)
                pair.fault(back, lambda: pair.come_back(1), job.kind)
                pair.train_on(3 * SAVE)
            pair.end()
        job.check_undamaged()
        job.check_equal(lab.unfailed(job.steps))

    return trial(job, whats, happen)


def refuse_machines(lab: Lab) -> list[Outcome]:
    """A machine with another config, or other code: refused by name before anything is trained."""
    job = lab.job("two machines that differ: refused", 20)
    whats = ["another config", "other code"]

    def happen() -> None:
        other = job.home.with_name(f"{job.home.name}-other")
        shutil.copytree(job.home, other)
        for home in (job.home, other):
            for path in HERE.glob("*.py"):
                shutil.copy(path, home)
            text = (home / "own.yaml").read_text().replace(f"{HERE}/", "")
            (home / "own.yaml").write_text(text)
        with machines(2, job.home) as nodes:
            config = (other / "own.yaml").read_text()
            (other / "own.yaml").write_text(config.replace("samples: 10", "samples: 12"))
            _refused(job, nodes, [job.home, other], "batch.samples 12 instead of 10")
            job.add(whats[0], None, None)
            (other / "own.yaml").write_text(config)
            code = other / "chaos_task.py"
            code.write_text(code.read_text().replace("- wanted) ** 2", "- wanted) ** 4"))
            _refused(job, nodes, [job.home, other], "chaos_task.py")
            job.add(whats[1], None, None)

    return trial(job, whats, happen)


def _refused(job: Job, nodes: list[Machine], homes: list[Path], says: str) -> None:
    place = f"{nodes[0].address}:{_PORT}"
    words = job.words("--nnodes", "2", "--rdzv", place, "--devices", "cpu")
    processes = [
        node.start_command(words, cwd=home, env={"CHAOS_HOME": str(home)})
        for node, home in zip(nodes, homes, strict=True)
    ]
    said = [process.communicate(timeout=_WAIT)[0] for process in processes]
    codes = [process.returncode for process in processes]
    require(codes == [2, 2], f"exit codes {codes}: {said}")
    require(any(says in text for text in said), f"said: {said}")
    require(not job.run.exists(), "a run was begun")
