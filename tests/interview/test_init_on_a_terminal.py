"""`samecurve init` as a person meets it: on a terminal, with wrong answers, Ctrl-C and Ctrl-D."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pexpect
import pytest

from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.tasks import Tasks
from samecurve_products.init import answers

DEVICES, TASK, DATA, PRESET = "Devices: .*", "Task .*", "Data: .*", "Preset: .*"
BATCH, SCALE, LAUNCHER = "Batch: .*", "Scale .*", "Launcher: .*"
FILE, START = "Config file .*", "Start it now.*"
SMALL = ("--preset", "small-language-model", "--data", "squares.txt")
VALUES = "model.width=16 data.samples=300 train.steps=40"
KNOWN = (
    "--devices",
    "cpu",
    *SMALL,
    "--batch",
    "8",
    "--scale-lr",
    "none",
    "--launcher",
    "samecurve",
)


class Talk:
    """A conversation with `samecurve init`."""

    def __init__(self, home: Path, *flags: str) -> None:
        words = ["-m", "samecurve", "init", *flags]
        self._child = pexpect.spawn(
            sys.executable, words, cwd=str(home), encoding="utf-8", dimensions=(60, 400), timeout=90
        )
        self._child.delaybeforesend = None

    def answer(self, prompt: str, text: str = "") -> str:
        """Answer a prompt. Returns what was shown before the prompt."""
        self._child.expect(rf"(?:^|\n){prompt}: $")
        before = str(self._child.before)
        self._child.sendline(text)
        return before

    def press(self, prompt: str, key: str) -> None:
        self._child.expect(rf"(?:^|\n){prompt}: $")
        self._child.sendcontrol(key)

    def end(self, code: int = 0) -> str:
        """The rest of what is shown, until the program ends with this exit code."""
        self._child.expect(pexpect.EOF)
        self._child.close()
        rest = str(self._child.before)
        assert self._child.exitstatus == code, rest
        return rest


@pytest.fixture
def home(tmp_path: Path, corpus: Path) -> Path:
    (tmp_path / "squares.txt").write_text(corpus.read_text())
    return tmp_path


def names(home: Path) -> set[str]:
    return {path.name for path in home.iterdir()} - {"squares.txt"}


def test_each_wrong_answer_is_asked_again_with_cause_and_remedy(home: Path) -> None:
    (home / "there.yaml").write_text("task: language\n")
    (home / "folder.yaml").mkdir()
    talk = Talk(home)
    wrong = (
        (DEVICES, "7", "GPU 7 does not exist", "there is no GPU here; --devices cpu:2"),
        (DEVICES, "cpu:0", "cpu:0: 0 CPU ranks", "between 1 and 256"),
        (DEVICES, "two", "neither auto, all, cpu, cpu:N nor a list", "for example --gpus 0,1"),
        (DEVICES, "", "", ""),
        (TASK, "languag", "task: languag is not a task", "did you mean language?"),
        (TASK, "my-task.py", "no name of a Python module", "--task my_task.py"),
        (TASK, "language", "", ""),
        (DATA, "nowhere.txt", "No preset of task language can be planned", "nowhere.txt"),
        (DATA, "squares.txt", "", ""),
        (PRESET, "3", "'3' is no preset here", "small-language-model, gpt2-class"),
        (PRESET, "smal-language-model", "is no preset", "did you mean small-language-model?"),
        (PRESET, "back", "", ""),
        (DATA, "squares.txt", "Presets, planned on cpu:2", "fits: "),
        (PRESET, "1", "", ""),
        (BATCH, "0", "batch.samples: should be greater than 0", "a whole number, such as 32"),
        (BATCH, "many", "should be a valid integer (is 'many')", "a whole number, such as 32"),
        (BATCH, "--batch 9", "batch 9 = ", ""),
        (SCALE, "twice", "'twice' is not one of none, linear, sqrt", "type none, linear or sqrt"),
        (SCALE, "linear", "learning rate 0.003 x 0.28125 (linear: batch 9 against 32)", ""),
        (LAUNCHER, "slurm", "'slurm' is no launcher here", "samecurve or torchrun"),
        (LAUNCHER, "", "", ""),
        (FILE, "mine.json", "mine.json: a config is YAML here", "a name that ends in .yaml"),
        (FILE, "folder.yaml", "folder.yaml is a directory", "the name of a file"),
        (FILE, "sub/mine.yaml", "there is no directory sub", "mkdir -p sub makes it"),
        (FILE, "squares.txt/mine.yaml", "squares.txt: a file lies where a directory", "rename"),
        (FILE, "/proc/mine.yaml", "/proc", "another name"),
        (FILE, "there.yaml", "", ""),
        ("there.yaml exists. Replace it.*", "perhaps", "neither yes nor no", "type yes or no"),
        ("there.yaml exists. Replace it.*", "no", "", ""),
        (FILE, "mine.yaml", "", ""),
        (START, "later", "'later' is neither yes nor no", "type yes or no"),
    )
    said = ("", "")
    for prompt, text, cause, remedy in wrong:
        before = talk.answer(prompt, text)
        assert all(words in before for words in said), before
        said = cause, remedy
    before = talk.answer(START)
    assert all(words in before for words in said)
    talk.end()
    assert (home / "there.yaml").read_text() == "task: language\n"
    config = load_document(read_document(home / "mine.yaml"), Tasks()).config
    assert (config.batch.samples, config.schedule.base_batch) == (9, 32)
    assert config.data.model_dump()["source"] == "squares.txt"
    assert names(home) == {"mine.yaml", "config.schema.json", "there.yaml", "folder.yaml"}


@pytest.mark.parametrize(("prompt", "key"), [(DEVICES, "c"), (BATCH, "d"), (FILE, "c")])
def test_ctrl_c_and_ctrl_d_leave_nothing(home: Path, prompt: str, key: str) -> None:
    code, says = {
        "c": (130, "stopped by Ctrl-C: nothing was kept; the same command begins anew"),
        "d": (2, "Ctrl-D ended the questions before all were answered; nothing was written"),
    }[key]
    left = {DEVICES: ("--devices", "cpu"), BATCH: ("--batch", "8"), FILE: ()}[prompt]
    given = shlex.join(KNOWN).replace(shlex.join(left), "")
    talk = Talk(home, *given.split())
    talk.press(prompt, key)
    assert says in talk.end(code)
    assert names(home) == set()


def test_ctrl_c_at_the_end_keeps_the_files(home: Path) -> None:
    talk = Talk(home, *KNOWN, "c.yaml", "--no-schema")
    talk.press(START, "c")
    assert "stopped by Ctrl-C: the files above are written" in talk.end(130)
    assert names(home) == {"c.yaml"}


def test_a_file_that_is_there_is_replaced_only_if_that_is_confirmed(home: Path) -> None:
    (home / "old.yaml").write_text("old\n")
    talk = Talk(home, "old.yaml", *KNOWN, "--no-start", "--no-schema")
    assert "Presets" not in talk.answer("old.yaml exists. Replace it.*", "yes")
    assert "wrote  old.yaml" in talk.end()
    text = (home / "old.yaml").read_text()
    assert text.startswith("# Made by `samecurve init`")
    assert "batch: {samples: 8}" in text
    assert names(home) == {"old.yaml"}


def printed_line(rest: str) -> list[str]:
    line = re.findall(r"^train  (.*)$", rest.replace("\r", ""), re.MULTILINE)[-1]
    return shlex.split(line)


@pytest.mark.long
def test_a_task_of_ones_own_is_made_and_starts_at_once(home: Path) -> None:
    talk = Talk(home)
    talk.answer(DEVICES, "cpu")
    talk.answer(TASK, "my_task.py")
    rest = talk.answer(START, "yes")
    assert printed_line(rest)[-3:] == ["train", "-f", "my_task.yaml"]
    assert "done   step 200  200 steps" in talk.end()
    assert len(list(home.glob("runs/my_task-*/journal.jsonl"))) == 1


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["samecurve", "torchrun"])
def test_the_printed_line_trains(home: Path, launcher: str) -> None:
    """As it stands: the class that `init` makes, and then a config for that class."""
    subprocess.run(
        [sys.executable, "-m", "samecurve", "init", "--task", "points.py"], cwd=home, check=True
    )
    talk = Talk(home, "two.yaml", "--task", "points.py:Points", "--launcher", launcher)
    talk.answer(DEVICES, "cpu:2")
    talk.answer("Values that the class reads: .*")
    missing = talk.answer("Values that the class reads: .*", VALUES)
    assert "Points.__init__(): KeyError: 'width'" in missing
    for prompt in (BATCH, SCALE):
        talk.answer(prompt)
    line = printed_line(talk.answer(START))
    talk.end()
    done = subprocess.run(line, cwd=home, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Running on 2 devices (CPU ranks)" in done.stdout
    assert "done   step" in done.stdout


@pytest.mark.long
def test_a_preset_trains_some_steps_as_its_line_stands(home: Path) -> None:
    talk = Talk(home, "small.yaml", *SMALL)
    for prompt in (DEVICES, BATCH, SCALE, LAUNCHER):
        talk.answer(prompt)
    line = printed_line(talk.answer(START))
    talk.end()
    run = pexpect.spawn(line[0], line[1:], cwd=str(home), encoding="utf-8", timeout=280)
    run.expect(r"step +\d+/")  # a busy machine shows fewer lines
    run.sendintr()
    run.expect(pexpect.EOF)
    run.close()
    assert run.exitstatus == 130
    assert "saved  step" in str(run.before)
    assert len(list(home.glob("runs/small-*/checkpoints/step-*"))) == 1


def test_a_wait_for_an_answer_ends_with_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one whose handler raises nothing: it may have come just before the wait began."""
    reads, writes = os.pipe()
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with os.fdopen(reads) as nothing:
            monkeypatch.setattr(sys, "stdin", nothing)
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            answers._wait_for_input()  # else it would wait for ever
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, old)
        os.close(writes)
