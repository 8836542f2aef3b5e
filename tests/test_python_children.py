"""Every Python process of the program starts as safely as the command `samecurve`.

A directory that somebody else made may hold a `random.py` or a `samecurve/__init__.py`. Nothing
there is executed, whatever command is given in that directory or for a run in it.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from commands import until, write_config
from samecurve.processes import child_environment, python_module
from samecurve_products.page.jobs.desk import Desk, JobCommand
from samecurve_products.page.jobs.job import ENDED
from samecurve_products.page.jobs.queue import Queue
from samecurve_products.page.roots import Catalogue, Root

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
# names of Python's own modules that torch, numpy and we import, and the package itself
TRAPS = (
    *("random.py", "token.py", "copy.py", "profile.py", "json.py", "torch.py", "sitecustomize.py"),
    *("samecurve/__init__.py", "samecurve/__main__.py"),
)
# the files that name this Python, and start nothing by it
NAMES_PYTHON = (
    "samecurve/core/system/installation.py",  # pip's words
    "samecurve_products/init/new_files.py",  # a program beside it
    *("samecurve_products/submit/verb.py", "samecurve_products/submit/ray_job.py"),  # --python
    "samecurve_products/rehearse/emulator.py",  # the programs beside it
    "samecurve/launch/host_launch.py",  # a field of torch's agent, which starts ranks as we do
)
ROOM = "samecurve/processes"
COMPILES = "samecurve_products/rehearse/emulated_cuda/build.py"  # runs g++, and nothing of ours
# the files that fork themselves, with all that they have opened
FORK = ("samecurve_products/page/jobs/shepherd.py", "samecurve/worker/data_workers.py")
OTHER_STARTS = (
    r"os\.(system|popen|posix_spawn\w*|spawn\w*|fork\w*)|pty\.spawn"
    r"|subprocess\.(Popen|run|call|check_\w+|get\w*output)"
)

TASK = """\
import numpy as np
from helper import WIDTH
from on_path import ROWS
from torch import nn
from samecurve import Mean

class Mine:
    def model(self):
        import helper
        return nn.Linear(helper.WIDTH, 1)
    def loss(self, model, batch):
        out = model(batch["x"])
        return Mean(out.square().sum(), len(out))
    def train_data(self):
        return Rows()

class Rows:
    def __len__(self):
        return ROWS
    def __getitem__(self, ids):
        return {"x": np.float32(ids)[:, None].repeat(WIDTH, 1)}
"""


def set_traps(home: Path, marks: Path, names: Sequence[str] = TRAPS) -> None:
    """Files that leave a mark when they are executed."""
    marks.mkdir(exist_ok=True)
    for name in names:
        trap = home / name
        trap.parent.mkdir(parents=True, exist_ok=True)
        mark = marks / name.replace("/", "-")
        trap.write_text(f"open({str(mark)!r}, 'w').close()\n")


def sprung(marks: Path) -> list[str]:
    return sorted(mark.name for mark in marks.iterdir())


def test_only_one_room_starts_processes() -> None:
    """Python's name, `-m MODULE`, subprocess, multiprocessing and shells are nowhere else."""
    found = [
        f"{name}: {what}"
        for file in sorted(SOURCES.rglob("*.py"))
        if not (name := str(file.relative_to(SOURCES))).startswith(f"{ROOM}/")
        if re.search(
            r"executable|\bos\.|pty|processing|subprocess|ProcessPool|\"python", file.read_text()
        )
        for node in ast.walk(ast.parse(file.read_text()))
        if (what := _start(node))
        if not (what == "sys.executable" and name in NAMES_PYTHON)
        if not (what == "os.fork" and name in FORK)
        if not (what == "subprocess.run" and name == COMPILES)
    ]
    assert found == []


def _start(node: ast.AST) -> str:
    """What starts a process otherwise than through the one room; '': nothing."""
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        return text if text == "sys.executable" or re.fullmatch(OTHER_STARTS, text) else ""
    if isinstance(node, ast.ImportFrom) and node.module == "subprocess":
        passed_on = {"PIPE", "DEVNULL", "CompletedProcess"}
        return "" if {name.name for name in node.names} <= passed_on else ast.unparse(node)
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multiprocessing"):
        return "" if node.module == "multiprocessing.connection" else ast.unparse(node)
    if isinstance(node, ast.Import):
        return next((one.name for one in node.names if "multiprocessing" in one.name), "")
    if isinstance(node, ast.Name | ast.alias):
        name = node.id if isinstance(node, ast.Name) else node.name
        return name if name == "ProcessPoolExecutor" else ""
    if isinstance(node, ast.List | ast.Tuple) and node.elts:  # a command line
        words = [word.value for word in node.elts if isinstance(word, ast.Constant)]
        is_python = re.match(r"python[\d.]*$", str(words[0])) if words else None
        is_safe = "-P" in words or not is_python
        return "" if is_safe else ast.unparse(node)
    return ""


def test_the_shell_scripts_start_python_without_the_working_directory() -> None:
    """Each start has -P; a line that older Pythons run too removes the directory itself."""
    starts = [
        f"{file.name}: {line.strip()}"
        for file in sorted((ROOT / "scripts").glob("*.sh"))
        for line in file.read_text().splitlines()
        if re.search(r'"\$(PYTHON|python|1)" -(?!P )', line) and "del sys.path[0]" not in line
    ]
    assert starts == []


def test_a_command_executes_nothing_of_its_directory(tmp_path: Path, corpus: Path) -> None:
    """`plan` starts the process that describes the task, in a directory full of traps."""
    home, marks = tmp_path / "home", tmp_path / "marks"
    set_traps(home, marks)
    config = write_config(home, corpus)
    words = python_module("samecurve", "plan", "-f", str(config), "--devices", "cpu:2")
    done = subprocess.run(words, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sprung(marks) == []


def test_python_dash_m_samecurve_takes_no_module_of_its_directory(tmp_path: Path) -> None:
    """torchrun starts ranks so; a package `samecurve` there is Python's own choice."""
    set_traps(tmp_path / "home", tmp_path / "marks")
    shutil.rmtree(tmp_path / "home" / "samecurve")
    words = [sys.executable, "-m", "samecurve", "--version"]
    done = subprocess.run(words, cwd=tmp_path / "home", capture_output=True, text=True, check=True)
    assert done.stdout.startswith("samecurve")
    assert sprung(tmp_path / "marks") == []


def test_a_source_tree_that_is_not_installed_serves_its_children(
    tmp_path: Path, corpus: Path
) -> None:
    """`cd src; python -m samecurve`: the children run the same copy."""
    package = SOURCES / "samecurve"
    shutil.copytree(package, tmp_path / "samecurve", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "samecurve" / "run" / "describe.py").write_text("print('the copy'); exit(3)\n")
    words = [sys.executable, "-m", "samecurve", "plan", "-f", str(write_config(tmp_path, corpus))]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "the copy" in done.stdout + done.stderr


@pytest.mark.long  # trainings, a check and a verification, each with fresh processes
def test_no_command_executes_anything_beside_or_in_a_run(tmp_path: Path, corpus: Path) -> None:
    """Ranks, data workers, pools of ranks, trials, trackers and jobs, in the run and beside it."""
    home, marks = tmp_path / "home", tmp_path / "marks"
    set_traps(home, marks)
    config = str(write_config(home, corpus, steps=6, save=3))
    cpus = ("--devices", "cpu:2")
    commands = [
        ("train", "-f", config, *cpus, "--num-workers", "1", "--save-dir", "run"),
        ("train", "-f", config, *cpus, "--save-dir", "other"),
        ("eval", "run"),
        ("audit", "run"),
        ("sample", "run"),
        ("compare-runs", "run", "other"),
        ("verify", "-f", config, "--layouts", "ddp:2"),
        ("check", *cpus),
    ]
    for words in commands:
        _run(home, words)
        assert sprung(marks) == [], words
    set_traps(home / "run", marks)
    for words in [("eval", "."), ("audit", "."), ("plan", "-f", "config.yaml")]:
        _run(home / "run", words)
        assert sprung(marks) == [], words
    desk = Desk(Catalogue([Root.of(home)]))
    job = desk.start_command(JobCommand(["eval", "run"], "evaluate run", home, "cpu:2", None))
    queue = Queue(home / "queue")
    until(lambda: queue.find(str(job["id"])).outcome().state in ENDED)
    assert queue.find(str(job["id"])).outcome().state == "finished"
    assert sprung(marks) == []


def _run(home: Path, words: Sequence[str]) -> None:
    command = python_module("samecurve", *words)
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}, done.stderr  # 1: `check` and `compare-runs` may find faults
    assert "Error" not in done.stderr


@pytest.mark.long  # two trainings with fresh processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_task_imports_its_neighbours_and_pythonpath(tmp_path: Path, ranks: int) -> None:
    """Neighbours with names of Python's own modules don't disturb the program."""
    set_traps(tmp_path / "home", tmp_path / "marks", names=TRAPS[:4])
    (tmp_path / "home" / "helper.py").write_text("WIDTH = 3\n")
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "on_path.py").write_text("ROWS = 40\n")
    (tmp_path / "home" / "mine.py").write_text(TASK)
    (tmp_path / "home" / "mine.yaml").write_text(
        "task: mine.py:Mine\nbatch: {samples: 4}\ntrain: {steps: 3}\n"
    )
    words = ("train", "-f", "mine.yaml", "--devices", f"cpu:{ranks}", "--num-workers", "1")
    done = subprocess.run(
        python_module("samecurve", *words),
        cwd=tmp_path / "home",
        env=child_environment(PYTHONPATH=str(tmp_path / "library")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "done   step 3" in done.stdout
    assert sprung(tmp_path / "marks") == []
