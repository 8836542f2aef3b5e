"""Failures of a world are explained by their cause.

Each one that a CPU machine can have is provoked, and what the ranks really printed is explained.
Those that need GPUs have samples of what the libraries print.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samecurve.diagnose.crash import explain
from samecurve.diagnose.known_failures import diagnose, known_failures
from samecurve.errors import RunError, SamecurveError

HERE = Path(__file__).parent
ROWS, COLUMNS = 25, 160
KNOWN_FAILURES = known_failures()

# what torch says where there is no GPU follows from its build
NO_CUDA = ("no GPU", "sees no GPU")
if torch.version.cuda is None and torch.version.hip is None:
    NO_CUDA = ("torch without CUDA", "asks for CUDA")
# what fails -> the ranks it takes, the entry it must be told as ('': none), words that must be in
# it
PROVOKED: dict[str, tuple[int, str, str]] = {
    "address_in_use": (1, "address in use", "is taken"),
    "master_refuses": (1, "master not reached", "not reached at 127.0.0.1:"),
    "too_few_ranks": (1, "ranks missing", "1 of 2 ranks came"),
    "late_for_a_collective": (2, "a collective timed out", "others: rank 1 had not failed"),
    "nobody_answers": (1, "a collective timed out", "/word"),
    "late_for_a_barrier": (2, "a rank came not to the barrier", "rank 1 did not come"),
    "unused_parameters": (2, "unused parameters", "for their gradients: 2 3"),
    "models_differ": (2, "models differ", "the ranks have different models: "),
    "model_shapes_differ": (
        2,
        "model shapes differ",
        "rank 1: the ranks have different models: parameter 0 has sizes [3, 2] here",
    ),
    "shapes_differ": (2, "shapes differ (gloo)", "different sizes"),
    "shapes_differ_in_detail": (2, "collectives differ", "ALLREDUCE[1010]"),
    "killed": (2, "", "rank 1 was ended by SIGKILL"),
    "raised": (2, "", "rank 1: ValueError: sample 3 is broken"),
    "crashed": (1, "", "rank 0 was ended by SIGSEGV"),
    "left": (1, "", "the config names no data"),
    "worker_killed": (1, "data worker died", "data worker (pid"),
    "worker_raises": (1, "", "ValueError: sample 3 is broken"),
    "worker_without_room": (1, "data worker: shared memory full", "/dev/shm"),
    "no_space": (1, "no space left", "no space is left"),
    "no_space_to_save": (1, "no space left: torch.save", "the disk is full"),
    "truncated": (1, "checkpoint damaged", "not whole"),
    "pickled": (1, "checkpoint is a pickle", "more than tensors"),
    "module_missing": (1, "module not found", "module nonesuch was not found"),
    "name_missing": (1, "name not in its module", "os has no nonesuch"),
    "syntax": (1, "syntax error", "script.py:2"),
    "no_guard": (1, "no __main__ guard", "__main__"),
    "numpy_memory": (1, "CPU out of memory", "32.0 GiB"),
    "torch_memory": (1, "CPU out of memory", "17179869184 bytes"),
    "python_memory": (1, "CPU out of memory", "could not get more memory\n"),
    "library_memory": (1, "libraries past the limit", "libtorch"),
    "no_thread": (1, "too many processes", "no more threads"),
    "no_files": (1, "too many open files", "no more files"),
    "sparse_gradients": (1, "sparse gradients", "of which torch computes no norm"),
    "other_model": (
        1,
        "checkpoint of another model",
        'than Two: Missing key(s) in state_dict: "used.weight"',
    ),
    "other_shapes": (1, "checkpoint of another model", "size mismatch for weight"),
    "saved_from_ddp": (1, "checkpoint saved from DDP", "Linear is none"),
    "no_cuda": (1, *NO_CUDA),
    "no_group": (1, "no process group", "without a process group"),
    "no_rank": (1, "no rank in the environment", "RANK is not set"),
}

SAMPLES = [
    (name, text.strip())
    for name, text in re.findall(
        r"^## (.+)\n([^#]+)", (HERE / "samples.txt").read_text(), re.MULTILINE
    )
]  # as the libraries print it


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of PROVOKED, in their directories."""
    home = tmp_path_factory.mktemp("failures")
    subprocess.run(
        [
            sys.executable,
            HERE / "provoke.py",
            home,
            *(f"{name}:{ranks}" for name, (ranks, _, _) in PROVOKED.items()),
        ],
        check=True,
        timeout=200,
    )
    return home


def fits(error: SamecurveError) -> str:
    """What is shown, which must fit a screen and begin with the cause."""
    shown = f"error: {error}"
    assert sum(-(-len(line) // COLUMNS) for line in shown.splitlines()) <= ROWS, shown
    assert shown.count("remedy: ") == 1
    return shown


@pytest.mark.parametrize("name", PROVOKED)
def test_a_failure_that_really_happened_is_told(name: str, failures: Path) -> None:
    ranks, entry, words = PROVOKED[name]
    exits = {
        int(rank): code
        for rank, code in json.loads((failures / name / "exits.json").read_text()).items()
        if code
    }
    if 77 in exits.values():
        pytest.skip("no mount namespaces for this user")
    # ranks end within milliseconds of each other: either may be the first
    for order in (exits, dict(reversed(exits.items()))):
        error = explain([], order, failures / name, world_size=ranks)
        shown = fits(error)
        assert words in shown + "\n"
        assert isinstance(error, RunError)
        if entry:
            known = next(known for known in KNOWN_FAILURES if known.name == entry)
            assert (error.remedy, error.again) == (known.remedy, known.again) or "{" in known.remedy
            assert error.trace
        rank = re.search("rank (.)", shown)
        assert rank is not None
        assert error.log == str(failures / name / f"rank-{rank[1]}.log")
        assert error.again or entry


def test_every_entry_is_provoked_or_has_a_sample() -> None:
    tried = {entry for _, entry, _ in PROVOKED.values()} | {name for name, _ in SAMPLES}
    assert tried - {""} == {known.name for known in KNOWN_FAILURES}


@pytest.mark.parametrize(("name", "text"), SAMPLES)
def test_no_sample_is_taken_for_another_failure(name: str, text: str, tmp_path: Path) -> None:
    diagnosis = diagnose(text)
    assert diagnosis is not None
    assert diagnosis.known.name == name
    (tmp_path / "rank-0.log").write_text(
        'Traceback (most recent call last):\n  File "/home/x/train.py", line 7, in <module>\n   '
        f" main()\n{text}\n"
    )
    shown = fits(explain([], {0: 1}, tmp_path))
    assert "  /home/x/train.py:7 in <module>: main()\n" in shown or text.startswith("[rank")
    assert not any(blank in shown.splitlines()[0] for blank in ("{", "()", "( ", " )", "  "))
