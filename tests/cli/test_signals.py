"""Every verb that takes time, stopped by Ctrl-C, SIGTERM or a closed terminal at its worst moment.

The last line says what was stopped and what is kept, the exit code is 128 + the signal, and no
process and no file is left.
"""

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import command, samecurve, until, write_config
from samecurve.launch.script.script_attempt import BOOTSTRAP

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
PAUSING = Path(__file__).with_name("pausing.py")
# moments: two ranks of the verb compute; the verb's own script says so
RANKS, SCRIPT = "ranks", "script"
NOTHING = "stopped by (Ctrl-C|SIGTERM): nothing was kept; the same command begins anew"


SLEEPS = """\
import os, time
from pathlib import Path
Path(os.environ["PAUSED"] + os.environ.get("RANK", "0")).touch()
time.sleep(60)
"""


@dataclass(frozen=True)
class Case:
    """A verb, the moment of the signal, and what is left then."""

    verb: str
    moment: str  # RANKS, SCRIPT, or a place as pausing.py takes it
    last_line: str = NOTHING  # a regular expression
    leaves: str = ""  # a directory that may be new


_RENAME = "pathlib:Path.rename"  # everything is written, and nothing is published
CASES = {
    "plan": Case("plan -f tiny.yaml --set model.hidden_size=64", "subprocess:Popen.wait"),
    "verify": Case("verify -f tiny.yaml --layouts ddp:2 --steps 60", RANKS),
    "bench": Case("bench -f tiny.yaml --worlds 2 --strategies ddp --steps 5000", RANKS),
    "bench-end": Case("bench -f tiny.yaml --worlds 1 --steps 1 --warm 1", _RENAME),
    "suite": Case(
        "bench --suite cpu --worlds 2 --strategies ddp --steps 5000",
        RANKS,
        "stopped by .*: bench/suite-cpu has what was measured; the same command goes on from it",
        "bench",
    ),
    "profile": Case("profile -f tiny.yaml --devices cpu:2 --steps 1000 --trace t.json", RANKS),
    "eval": Case("eval RUN --devices cpu", "samecurve.torch_engine.engine:TorchEngine.evaluate"),
    "eval-ranks": Case("eval RUN --devices cpu:2", "samecurve.launch.supervisor:RankGroup.watch"),
    "sample": Case("sample RUN", "samecurve.run.sample_run:_samples"),
    "export": Case("export RUN --to out", _RENAME),
    "report": Case("report RUN --to rep", "pathlib:Path.replace"),
    "compare": Case(
        "compare-runs RUN RUN", "samecurve_products.report.compare.compare_runs:_compare_steps"
    ),
    "convert": Case("convert old.yaml --to new.yaml", "os:link"),
    "har": Case("data har --synthetic set", _RENAME),
    "train": Case(
        "train -f tiny.yaml --save-dir run --devices cpu",
        "samecurve.launch.local:launch",
        "stopped by .*: run has what was trained; the same command goes on from it",
        "run",
    ),
    "run": Case(
        "run --nproc 2 sleeps.py", SCRIPT, r"stop   by SIG\w+; logs runs/sleeps-.*/logs", "runs"
    ),
}
QUICK = {("plan", HUP), ("eval", TERM), ("sample", INT), ("compare", INT), ("run", HUP)}


def cases() -> Iterator[Any]:
    """Each signal on some verbs; all of them on all verbs in make test-long."""
    for name in CASES:
        for number in (INT, TERM, HUP):
            marks = () if (name, number) in QUICK else pytest.mark.long
            yield pytest.param(name, number, marks=marks, id=f"{name}-{number.name}")


@pytest.fixture
def home(tmp_path: Path, corpus: Path) -> Path:
    """A working directory with a config, a foreign config and a script; and directories beside."""
    work = tmp_path / "work"
    for directory in (work, tmp_path / "tmp"):
        directory.mkdir()
    write_config(work, corpus)
    (work / "old.yaml").write_text("base_model: a/b\nmicro_batch_size: 2\nlearning_rate: 1.0e-4\n")
    (work / "sleeps.py").write_text(SLEEPS)
    (work / "models").symlink_to(Path(__file__).parents[2] / "models")
    return work


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    home = tmp_path_factory.mktemp("trained")
    config = write_config(home, corpus, steps=2)
    samecurve("train", "-f", config, "--save-dir", "run", cwd=home)
    return home / "run"


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command: list[str], home: Path) -> None:
        self._paused = home.parent / "paused-"
        self._mark = os.urandom(8).hex()  # in the environment of all its processes
        environment = os.environ | {
            "TMPDIR": str(home.parent / "tmp"),
            "PAUSED": str(self._paused),
            "MARK": self._mark,
        }
        self.text = ""
        self._pid, self._screen = pty.fork()
        if self._pid == 0:
            os.chdir(home)
            for number in (INT, TERM, HUP):  # whatever started the tests may have them ignored
                signal.signal(number, signal.SIG_DFL)
            os.execve(command[0], command, environment)

    def processes(self) -> list[psutil.Process]:
        """All live processes of the command."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = process.environ().get("MARK") == self._mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def has_paused(self, number: int = 0) -> bool:
        self._read()
        assert not os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "it ended"
        return Path(f"{self._paused}{number}").exists()

    def has_ranks(self) -> bool:
        """Whether two ranks compute, beside the command: a rank has threads when it has met others.

        Their server and processes that describe the task have one thread each.
        """
        self._read()
        return sum(_threads(process) > 2 for process in self.processes()) > 2

    def moment(self, case: Case) -> Callable[[], bool]:
        """Says whether the case's moment has come."""
        if case.moment == RANKS:
            return self.has_ranks
        if case.moment == SCRIPT:
            return lambda: self.has_paused(0) and self.has_paused(1)
        return self.has_paused

    def send(self, number: signal.Signals) -> None:
        if number == INT:
            os.write(self._screen, b"\x03")
        elif number == TERM:
            os.kill(self._pid, number)
        else:
            os.close(self._screen)  # the kernel sends SIGHUP
            self._screen = -1

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        ended = os.pidfd_open(self._pid)
        until(lambda: not self._read() and select.select([ended], [], [], 0)[0], 30)
        os.close(ended)
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def kill(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        if self._screen >= 0:
            os.close(self._screen)

    def _read(self) -> bool:
        """Read what the terminal shows. False: nothing new, and nothing comes at the moment."""
        if self._screen < 0 or not select.select([self._screen], [], [], 0.02)[0]:
            return False
        try:
            self.text += os.read(self._screen, 1 << 16).decode(errors="replace")
        except OSError:  # no process has it open any more
            return False
        return True

    def last_line(self) -> str:
        """The last line, without what moves the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text).splitlines()[-1]


def _threads(process: psutil.Process) -> int:
    with suppress(psutil.Error):  # it has ended
        return int(process.num_threads())
    return 0


def command_of(case: Case, run: Path) -> list[str]:
    words = [str(run) if word == "RUN" else word for word in case.verb.split()]
    if case.moment in {RANKS, SCRIPT}:
        return command(*words)
    return [sys.executable, str(PAUSING), case.moment, *words]


@contextmanager
def on_terminal(command: list[str], home: Path) -> Iterator[Terminal]:
    """The command on a terminal. After the block none of its processes may live."""
    terminal = Terminal(command, home)
    try:
        yield terminal
        until(lambda: not terminal.processes(), 10)
    finally:
        print(terminal.text)
        terminal.kill()


def left_over(home: Path, cache: Path) -> set[str]:
    """What commands may have left: in the working directory, in TMPDIR, and in the cache."""
    scratch = [cache / kind for kind in ("verify", "bench", "suite", "profile")]
    left = [
        path for directory in (home, home.parent / "tmp", *scratch) for path in directory.glob("*")
    ]
    left += cache.rglob("*.part")
    # torch's cache of compiled code
    return {str(path) for path in left if not path.name.startswith("torchinductor_")}


@pytest.mark.parametrize(("name", "number"), list(cases()))
def test_a_signal_ends_a_verb_in_order(
    name: str, number: signal.Signals, home: Path, trained_run: Path, cache: Path
) -> None:
    case = CASES[name]
    before = left_over(home, cache)
    run_before = sorted(trained_run.rglob("*"))
    with on_terminal(command_of(case, trained_run), home) as terminal:
        until(terminal.moment(case))
        terminal.send(number)
        assert terminal.end() == 128 + number, terminal.text
    assert "Traceback" not in terminal.text
    if number != HUP:  # else the terminal is closed
        assert re.fullmatch(case.last_line, terminal.last_line()), terminal.text
    allowed = {str(home / case.leaves)} if case.leaves else set()
    assert left_over(home, cache) - before == allowed
    assert sorted(trained_run.rglob("*")) == run_before


def test_a_second_ctrl_c_ends_at_once(home: Path) -> None:
    """Here while what is half done is being removed."""
    places = f"{_RENAME},shutil:rmtree"
    line = [sys.executable, str(PAUSING), places, "data", "har", "--synthetic", "set"]
    with on_terminal(line, home) as terminal:
        until(terminal.has_paused)
        terminal.send(INT)
        until(lambda: terminal.has_paused(1))
        time.sleep(0.3)  # two signals within 0.2 s are one
        terminal.send(INT)
        assert terminal.end() == 130
    assert terminal.last_line() == "ended at once"
    assert not (home / "set").exists()


@pytest.mark.parametrize(("number", "name"), [(INT, "Ctrl-C"), (TERM, "SIGTERM")])
def test_a_signal_while_the_program_is_imported(
    number: signal.Signals, name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "click.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")]))
    with on_terminal(command("plan"), home) as terminal:
        until(terminal.has_paused)
        terminal.send(number)
        assert terminal.end() == 128 + number
    assert terminal.text.strip() in {f"stopped by {name}", f"^C\r\nstopped by {name}"}


def test_ctrl_c_while_a_rank_of_a_script_begins(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher passes it on, and says what happened; here is the rank alone."""
    (home / "ctypes.py").write_text(SLEEPS)  # the rank's first import
    monkeypatch.setenv("PYTHONPATH", str(home))
    words = [home / "report", os.getpid(), 0, "script", home / "sleeps.py"]
    with on_terminal([sys.executable, str(BOOTSTRAP), *map(str, words)], home) as terminal:
        until(terminal.has_paused)
        terminal.send(INT)
        assert terminal.end() == -INT
    assert terminal.text.strip() in {"", "^C"}


def test_a_signal_after_the_last_line_changes_nothing(home: Path, trained_run: Path) -> None:
    line = [sys.executable, str(PAUSING), "exit", "compare-runs", *[str(trained_run)] * 2]
    with on_terminal(line, home) as terminal:
        until(terminal.has_paused)
        terminal.send(INT)
        assert terminal.end() == 0
    assert "Traceback" not in terminal.text
