"""Of several ranks that failed, the one that began it is shown, once, on one screen.

And how the kernel's own kills are counted.
"""

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from test_known_failures import fits

import samecurve
from samecurve.diagnose.crash import explain
from samecurve.diagnose.notes import FailureNote, note_of, read_notes, write_note
from samecurve.diagnose.tracebacks import ATTEMPT_LINE, Frame, last_traceback
from samecurve.errors import (
    FAULTY_DEVICE,
    FaultyDeviceError,
    RunError,
    SamecurveError,
    UserError,
)
from samecurve.probe import oom_kills

HEAD = "Traceback (most recent call last):\n"
BROKEN = (
    HEAD + '  File "train.py", line 3, in step\n    loss = model(x)\nValueError: no such class: 7\n'
)
LOST = (
    HEAD + '  File "train.py", line 9, in step\n    dist.all_reduce(x)\nRuntimeError:'
    " [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1220: Connection reset by peer.\n"
)
LATE = (
    HEAD + '  File "train.py", line 9, in step\n    dist.all_reduce(x)\nRuntimeError:'
    " [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to"
    " complete\n"
)
KILL, TERM = -signal.SIGKILL, -signal.SIGTERM


def logs_of(home: Path, *texts: str) -> Path:
    for rank, text in enumerate(texts):
        (home / f"rank-{rank}.log").write_text(text)
    return home


@pytest.mark.parametrize(
    ("texts", "exits", "cause", "others"),
    [
        (
            (LOST, BROKEN),
            {0: 1, 1: 1},
            "rank 1: ValueError: no such class: 7",
            "rank 0 lost its peer",
        ),
        (
            (LATE, BROKEN),
            {0: 1, 1: 1},
            "rank 1: ValueError: no such class: 7",
            "rank 0 waited in vain",
        ),
        ((BROKEN, ""), {0: 1, 1: KILL}, "rank 0: ValueError", "rank 1 was ended"),
        (
            (BROKEN, "", "", LOST),
            {0: 1, 1: TERM, 2: TERM, 3: 1},
            "rank 0: ValueError",
            "rank 3 lost its peer; ranks 1, 2 were ended",
        ),
        ((BROKEN, BROKEN), {1: 1, 0: 1}, "rank 1: ValueError", "rank 0 failed too"),
        ((LOST, ""), {0: 1, 1: KILL}, "rank 1 was ended by SIGKILL", "rank 0 lost its peer"),
        ((LOST, ""), {0: 1, 1: TERM}, "rank 1 was ended by SIGTERM", "rank 0 lost its peer"),
        (
            (LATE, ""),
            {0: 1, 1: TERM},
            "rank 0: another rank did not answer in time",
            "rank 1 was ended",
        ),
        (
            (LATE, ""),
            {0: 1, 1: KILL},
            "rank 0: another rank did not answer in time",
            "rank 1 was ended",
        ),
        (("", LATE), {0: KILL, 1: 1}, "rank 0 was ended by SIGKILL", "rank 1 waited in vain"),
        (
            (LOST, LOST, ""),
            {0: 1, 1: 1},
            "rank 0: it lost another rank",
            "rank 1 lost its peer; rank 2 had not failed",
        ),
        ((BROKEN, ""), {1: KILL}, "rank 1 was ended by SIGKILL", "rank 0 had not failed"),
        (
            (BROKEN + f"{ATTEMPT_LINE} 2\n", ""),
            {0: 3},
            "rank 0 left with exit code 3 and no message",
            "rank 1 had not failed",
        ),
    ],
)
def test_consequences_are_not_the_cause(
    texts: tuple[str, ...], exits: Mapping[int, int], cause: str, others: str, tmp_path: Path
) -> None:
    """A log of an earlier start, or of a rank that was killed, is no evidence."""
    shown = fits(explain([], exits, logs_of(tmp_path, *texts), world_size=len(texts)))
    assert shown.startswith(f"error: {cause}")
    assert f"\n  others: {others}\n" in shown


def note(rank: int, error: BaseException, time: float, trace: str = "") -> FailureNote:
    written = note_of(rank, error)
    return replace(written, time=time, trace=trace or written.trace)


def test_what_an_error_says_itself_is_kept(tmp_path: Path) -> None:
    """A rank's word comes before what others lost by it, but not before what had failed already; a
    wait for other ranks is a consequence.
    """
    lost = note(0, RuntimeError("x"), 1.0, LOST)
    full = note(1, RunError("the journal can't be written", "free some space"), 2.0)
    slow = note(
        2,
        RunError(
            "pre-flight: a first collective over 3 devices did not end within 60 s",
            "look",
            again=True,
        ),
        3.0,
    )
    broken = note(3, ValueError("x"), 4.0, BROKEN)
    assert (
        str(explain([lost, full, slow], {}, tmp_path)).splitlines()[0]
        == "the journal can't be written"
    )
    assert str(explain([slow, broken], {}, tmp_path)).startswith(
        "rank 3: ValueError: no such class: 7"
    )
    alone = explain([slow], {}, tmp_path)
    assert isinstance(alone, RunError)
    assert (alone.cause, alone.remedy, alone.again) == (slow.cause, "look", True)
    wrong = explain(
        [note(0, UserError("no such key", "another", "tiny.yaml:3:1"), 1.0)], {}, tmp_path
    )
    assert (wrong.exit_code, str(wrong)) == (2, "tiny.yaml:3:1: no such key\n  remedy: another")
    faulty = explain([note(1, FaultyDeviceError("rank 1 computes wrong"), 1.0)], {}, tmp_path)
    assert isinstance(faulty, RunError)
    assert (faulty.exit_code, faulty.again) == (FAULTY_DEVICE, False)
    faulty.give_up()
    assert faulty.exit_code == FAULTY_DEVICE


def test_a_rank_that_left_early_is_the_cause_of_what_the_others_lost(tmp_path: Path) -> None:
    """It ended with 0, so nothing but its peers' loss tells of it: data of unequal length.

    Not so where a rank failed by itself.
    """
    error = explain([], {0: 1}, logs_of(tmp_path, LOST, ""), world_size=2, left_early=[1])
    shown = fits(error)
    assert shown.startswith(
        "error: rank 1 left with exit code 0 before the others were done\n  others: rank 0 lost its"
        " peer\n"
    )
    assert isinstance(error, RunError)
    assert not error.again
    assert str(
        explain([], {0: 1}, logs_of(tmp_path, BROKEN, ""), world_size=2, left_early=[1])
    ).startswith("rank 0: ValueError")


def test_a_fault_of_one_rank_s_own_names_it(tmp_path: Path) -> None:
    """A line of the user's own that failed on all ranks is told without one."""
    lines = [
        note(rank, UserError("Task.model(): ValueError: no", "mend it", "mine.py:7"), 1.0 + rank)
        for rank in (0, 1)
    ]
    assert str(explain(lines[1:], {1: 2}, tmp_path, world_size=2)).startswith(
        "rank 1: mine.py:7: Task.model()"
    )
    assert str(explain(lines, {0: 2, 1: 2}, tmp_path, world_size=2)).startswith(
        "mine.py:7: Task.model()"
    )


def test_a_script_is_promised_no_save(tmp_path: Path) -> None:
    assert "last save" in explain([], {1: KILL}, tmp_path, world_size=2).remedy
    assert "last save" not in explain([], {1: KILL}, tmp_path, world_size=2, resumes=False).remedy


OURS = '  File "/x/src/samecurve/torch_engine/step/training_step.py", line 3, in step\n    x.y\n'
LIBRARY = '  File "/x/site-packages/torch/optim/adamw.py", line 3, in step\n    x.y\n'
USERS = '  File "/home/me/samecurve/my_task.py", line 3, in loss\n    x.y\n'


@pytest.mark.parametrize(
    ("frames", "error", "is_reported"),
    [
        (OURS, "AttributeError: no y", True),
        (OURS + LIBRARY, "RuntimeError: no y", True),
        (OURS + USERS, "AttributeError: no y", False),
        (LIBRARY, "AttributeError: no y", False),
        (OURS.replace("torch_engine/step", "observe"), "KeyError: 'y'", True),
        (OURS, "OSError: [Errno 112] Host is down", False),
        (OURS, "torch.distributed.DistBackendError: unlike all", False),
    ],
)
def test_a_fault_of_our_own_asks_for_a_report(
    frames: str, error: str, *, is_reported: bool, tmp_path: Path
) -> None:
    """With what to send: the same command again would fail again."""
    remedy = fits_one(explain([], {0: 1}, logs_of(tmp_path, f"{HEAD}{frames}{error}\n")))
    wanted = ("report it", "this text", "`samecurve --version`", "config.yaml and plan.json")
    assert [words in remedy for words in wanted] == [is_reported] * len(wanted)


def fits_one(error: SamecurveError) -> str:
    fits(error)
    return error.remedy


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGSEGV, "PYTHONFAULTHANDLER=1"),
        (signal.SIGBUS, "/dev/shm"),
        (signal.SIGILL, "`lscpu`"),
        (signal.SIGABRT, "same command again"),
    ],
)
def test_a_signal_that_would_come_again_has_another_remedy(
    number: signal.Signals, words: str, tmp_path: Path
) -> None:
    assert words in explain([], {1: -number}, tmp_path, world_size=2).remedy


def test_notes_come_back_in_order(tmp_path: Path) -> None:
    late, early = note(0, RunError("a", again=True), 2.0), note(1, ValueError("b"), 1.0, BROKEN)
    for one in (late, early):
        write_note(tmp_path, "attempt", one)
    assert read_notes(tmp_path, "attempt") == [early, late]


def test_a_deep_failure_fits_a_screen(tmp_path: Path) -> None:
    """Launchers' frames go, the middle goes, what the user wrote is named."""
    launchers = [
        '<frozen runpy>", line 198, in _run_module_as_main',
        (
            '/x/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line'
            " 3, in wrapper"
        ),
        '/x/src/samecurve/launch/worker.py", line 9, in main',
        '/x/site-packages/torch/multiprocessing/spawn.py", line 9, in _wrap',
    ]
    users = [f'/home/me/train.py", line {number}, in level{number}' for number in range(40)]
    library = [
        f'/x/site-packages/torch/nn/functional.py", line {number}, in linear' for number in range(3)
    ]
    frames = "".join(
        f'  File "{frame}\n    {"deep(x) " * 40}\n    ^^^^^^\n'
        for frame in (*launchers, *users, *library)
    )
    logs_of(
        tmp_path,
        "starting\n"
        + "".join(
            f"[rank0]: {line}\n"
            for line in (
                HEAD + frames + "RuntimeError: " + "wrong " * 200 + "\nmore\n" * 30
            ).splitlines()
        )
        + "Exception ignored in: <function x>\n"
        + BROKEN
        + "[W1121 18:30:35.3 ProcessGroup.cpp:1] destroy_process_group() was not called\n",
    )
    shown = fits(explain([], {0: 1}, tmp_path))
    assert shown.startswith("error: rank 0: RuntimeError: wrong wrong")
    assert not any(
        name in shown
        for name in (
            "runpy",
            "elastic",
            "samecurve/launch",
            "spawn",
            "destroy_process_group",
            "no such class",
        )
    )
    assert "/home/me/train.py:0 in level0: deep(x)" in shown
    assert "32 frames left out" in shown
    assert "  torch/nn/functional.py:2 in linear: deep(x)" in shown
    assert "remedy: /home/me/train.py:39, in level39, is where your own code led there" in shown


def test_the_last_of_a_chain_is_taken() -> None:
    chain = (
        BROKEN
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + HEAD
        + '  File "x.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
    )
    traceback = last_traceback(chain)
    assert traceback is not None
    frame = traceback.frames[-1]
    assert (traceback.error, frame.path, frame.line) == ("SyntaxError: invalid syntax", "x.py", 1)
    assert last_traceback("nothing of the kind") is None


def test_the_kernels_kills(tmp_path: Path) -> None:
    """Told where they are counted: control groups of version 2, of version 1, the whole machine."""
    assert oom_kills(tmp_path) is None
    for path, text in (
        ("proc/vmstat", "pgfault 5\noom_kill 3\n"),
        ("proc/self/cgroup", "4:memory:/job\n0::/job/step\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert oom_kills(tmp_path) == 3
    for count, path in enumerate(
        (
            "memory/memory.oom_control",
            "memory/job/memory.oom_control",
            "memory.events",
            "job/step/memory.events",
        )
    ):
        (tmp_path / "sys/fs/cgroup" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / path).write_text(f"under_oom 0\noom_kill {10 + count}\n")
        assert oom_kills(tmp_path) == 10 + count


def test_a_killed_rank_says_whether_memory_ran_out(tmp_path: Path) -> None:
    errors = {count: explain([], {0: KILL}, tmp_path, oom_kills=count) for count in (None, 0, 2)}
    again = [isinstance(error, RunError) and error.again for error in errors.values()]
    assert again == [True, True, False]
    assert "; the kernel does so when memory runs out" in str(errors[None])
    assert "memory had not run out" in str(errors[0])
    assert "memory ran out, and the kernel ended 2 processes" in str(errors[2])


def test_each_folder_of_this_program_is_its_own_code() -> None:
    """A file of a folder that is not known would be shown as the user's line to correct."""
    root = Path(samecurve.__file__).parent
    for folder in {path.parent for path in root.glob("*/*.py")}:
        frame = Frame(f"/home/me/src/samecurve/{folder.name}/any.py", 1, "", "")
        assert (frame.is_ours, frame.is_users) == (True, False), folder.name
