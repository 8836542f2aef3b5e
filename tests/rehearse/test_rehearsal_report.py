"""What a rehearsal reads and says: the user's line first, nothing blamed on the wrong code."""

import json
import math
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from commands import refused
from samecurve.errors import RunError, UserError
from samecurve.probe.engines import TorchBuild
from samecurve_products.rehearse import emulator
from samecurve_products.rehearse.child import Ended, run_child
from samecurve_products.rehearse.config_rehearsal import compare
from samecurve_products.rehearse.emulated_cuda import build
from samecurve_products.rehearse.failure import failure_of_run, failure_of_script, with_failure
from samecurve_products.rehearse.rehearsal import Finding, Memory, Rehearsal, StepCosts
from samecurve_products.rehearse.rehearsal_text import as_json, as_text
from samecurve_products.rehearse.report_files import Report, place_of, shown

LIBRARY = "/venv/lib/python3.11/site-packages"
IN_TORCH = f"{LIBRARY}/torch/nn/modules/module.py:1789 _call_impl"
IN_TRAINER = f"{LIBRARY}/transformers/trainer.py:1911 _run_epoch"
OF_SAMECURVE = "/checkout/src/samecurve/torch_engine/step/step_metrics.py:234 read"
OF_THE_LOOP = "/checkout/src/samecurve/core/loop.py:96 train"
OF_THE_USER = "/home/me/my_task.py:31 loss"


@pytest.mark.parametrize(
    ("stack", "user", "inside", "is_own"),
    [
        ([IN_TORCH, OF_THE_USER, IN_TORCH, OF_SAMECURVE], "my_task.py:31", "my_task.py:31", False),
        ([IN_TORCH, OF_SAMECURVE, OF_THE_LOOP], "", "step_metrics.py:234", True),
        ([IN_TORCH, IN_TRAINER, OF_THE_USER], "my_task.py:31", "trainer.py:1911", False),
        ([IN_TORCH, IN_TRAINER], "", "trainer.py:1911", False),
        ([IN_TORCH], "", "module.py:1789", False),
        ([], "", "", False),
    ],
    ids=["user's", "samecurve's", "library's", "library alone", "torch alone", "no line"],
)
def test_the_users_line_comes_first_and_samecurves_own_is_not_blamed(
    stack: list[str], user: str, inside: str, *, is_own: bool
) -> None:
    place = place_of(stack)
    assert user in shown(place.user)
    assert bool(user) == (place.user is not None)
    assert inside in shown(place.inside)
    assert place.is_own == is_own


def write_report(directory: Path, rank: int, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / f"{rank}.jsonl").write_text(text + '{"row": "fin')  # its death cut a line short


def step(number: int, **syncs: int) -> dict[str, Any]:
    """A row of a step. syncs: how often a number is read at the user's, a library's, our lines"""
    stacks = {
        "user": (IN_TORCH, OF_THE_USER),
        "library": (IN_TRAINER,),
        "samecurve": (OF_SAMECURVE, OF_THE_LOOP),
    }
    return {
        "row": "step",
        "step": number,
        "memory_peak": 100 * number,
        "launches": 70 + number,
        "collectives": 2,
        "collective_bytes": 1024,
        "copies_to_device": 3,
        "copies_to_host": 1,
        "syncs": {
            "\n".join(["aten::_local_scalar_dense", *stacks[whose]]): count
            for whose, count in syncs.items()
        },
    }


def finding(kind: str, *here: str, there: str = "") -> dict[str, Any]:
    text = "reads without waiting"
    return {"row": "finding", "kind": kind, "text": text, "here": here, "there": [there]}


def test_steady_steps_are_counted_and_ranks_are_merged(tmp_path: Path) -> None:
    """Steps 1 and 2 warm up: what they wait for is not shown."""
    first = step(1, user=2, samecurve=1, library=5)
    later = [step(number, user=2, samecurve=1) for number in range(2, 6)]
    race = finding("race", IN_TORCH, OF_THE_USER, there=IN_TRAINER)
    write_report(
        tmp_path, 0, first, race, race, *later, {"row": "end", "command": ["my.py"], "counts": {}}
    )
    write_report(tmp_path, 1, first, *later[:1], race, *later[1:])
    report = Report(tmp_path)
    assert (report.steps, report.peak) == (5, 500)
    found = {one.kind: one for one in report.findings()}
    assert len(report.findings()) == len(found) == 2
    assert found["host sync"].place == "/home/me/my_task.py:31 in loss"
    assert found["host sync"].text.startswith("a number is read")
    assert (found["host sync"].times, found["host sync"].fails) == (2, False)
    assert (found["race"].processes, found["race"].step, found["race"].fails) == (2, 2, True)
    assert "trainer.py:1911" in found["race"].there
    costs = report.costs()
    assert costs is not None
    assert (costs.operations, costs.collectives, costs.own_syncs) == (74, 2, 1)
    assert (costs.copies_to_device, costs.copies_to_host) == (3, 1)


def test_steps_that_prove_the_run_are_no_steady_ones(tmp_path: Path) -> None:
    """A run of 5 steps is probed in steps 1, 2 and 4; where nothing else is left they count."""
    steps = [step(number, user=9 if number == 4 else 2, samecurve=1) for number in range(1, 6)]
    write_report(tmp_path, 0, *steps)
    for unlike, times in (({1, 2, 4}, 2), ({1, 2, 3, 4, 5}, 13 / 3)):
        (found,) = Report(tmp_path, unlike).findings()
        assert found.times == pytest.approx(times)


def test_a_report_without_steps_has_no_costs(tmp_path: Path) -> None:
    write_report(tmp_path, 0, finding("host_read", OF_THE_USER))
    report = Report(tmp_path)
    assert (report.steps, report.costs()) == (0, None)
    assert [(one.kind, one.step) for one in report.findings()] == [("host_read", 1)]


def test_a_pinned_buffer_is_told_by_its_copy_and_not_where_it_was_noticed(tmp_path: Path) -> None:
    write_report(tmp_path, 0, finding("pinned_source", IN_TRAINER, there=OF_THE_USER))
    (found,) = Report(tmp_path).findings()
    assert (found.place, "trainer.py:1911" in found.there) == (
        "/home/me/my_task.py:31 in loss",
        True,
    )


def test_a_failure_that_the_emulator_saw_too_is_told_once() -> None:
    """The emulator knows the line of a script's failure best; `train` knows a remedy."""
    failure = Finding(kind="device", text="both", remedy="move it", place="", step=1)
    seen = Finding(kind="device", text="seen", place="a.py:3 in loss", step=1)
    race = Finding(kind="race", text="reads", place="a.py:4 in loss", step=1)
    assert with_failure(failure, [seen, race]) == [
        Finding(kind="device", text="both", remedy="move it", place="a.py:3 in loss", step=1),
        race,
    ]


def test_a_failed_backward_pass_is_told_at_its_forward_line() -> None:
    """A traceback knows the call of backward() alone. A rank that waits for the failed one is no
    finding beside it.
    """
    at_call = "/home/me/a.py:9 in main: loss.backward()"
    failure = Finding(kind="not_deterministic", text="median", place=at_call, step=1)
    forward = "/home/me/a.py:3 in loss (its backward pass)"
    seen = Finding(kind="not_deterministic", text="no kernel", place=forward, step=1)
    waits = Finding(kind="hang", text="never ends", place="/home/me/a.py:8 in main", step=1)
    told = with_failure(failure, [seen, waits])
    assert [(one.text, one.place) for one in told] == [("median", forward)]


def test_the_emulators_own_lines_are_nobodys() -> None:
    emulator = "/checkout/src/samecurve_products/rehearse/emulated_cuda/nccl_rules.py"
    errors = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 7, in main\n'
        "    dist.all_reduce(x.t())\n"
        f'  File "{emulator}", line 40, in check_single\n'
        '    raise ValueError("Tensors must be contiguous")\n'
        "ValueError: Tensors must be contiguous\n"
    )
    failure = failure_of_script(Ended(1, errors), 1)
    assert failure.place == "/home/me/train.py:7 in main: dist.all_reduce(x.t())"
    view = "/checkout/src/samecurve/torch_engine/model/one_device_view.py:90 function"
    place = place_of([f"{emulator}:40 check_single", view, OF_SAMECURVE])
    assert "step_metrics.py:234" in shown(place.inside)


TORCHRUN = f"""\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 45, in loss_of
[rank0]:   File "/home/me/train.py", line 60, in main
[rank1]:     loss = loss * torch.ones(1)
[rank0]:     dist.barrier()
[rank1]: RuntimeError: Expected all tensors to be on the same device, but found cuda:1 and cpu!
[rank0]: RuntimeError: Connection closed by peer
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "{LIBRARY}/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_a_failed_script_is_told_by_the_users_line_and_not_by_torchruns() -> None:
    alone = "".join(line for line in TORCHRUN.splitlines(keepends=True) if "[rank0]" not in line)
    failure = failure_of_script(Ended(1, alone), 1)
    assert failure.kind == "device"
    assert failure.place == "/home/me/train.py:45 in loss_of: loss = loss * torch.ones(1)"
    assert "train.py" in failure_of_script(Ended(1, TORCHRUN), 1).place  # mixed lines are parted
    killed = failure_of_script(Ended(-9, "no traceback"), 3)
    assert killed.text == "it was ended by SIGKILL, and left no traceback"


def test_a_failed_run_keeps_the_cause_and_remedy_of_train() -> None:
    said = (
        "error: rank 1: wrong.py:21: MyTask.loss(): RuntimeError: Expected all tensors to be on the"
        " same device, but found at least two devices, cuda:1 and cpu!\n"
        "  remedy: make the tensor on the batch's device\n"
    )
    failure = failure_of_run(Ended(2, f"plan   world 2\n{said}"), 1)
    assert (failure.kind, failure.place) == ("device", "wrong.py:21")
    assert failure.text.startswith("MyTask.loss(): RuntimeError: Expected all tensors")
    assert failure.remedy == "make the tensor on the batch's device"


@pytest.mark.parametrize(
    ("emulated", "difference"),
    [([2.0, 1.0], 0.0), ([2.0, 1.5], 0.5), ([2.0, None], math.inf), ([2.0], math.inf)],
)
def test_losses_are_compared_step_by_step(emulated: list[float | None], difference: float) -> None:
    assert compare(emulated, [2.0, 1.0], 1e-4).difference == difference


def rehearsal(*findings: Finding, steps: int = 5, exit_code: int = 0) -> Rehearsal:
    return Rehearsal(
        command="-f my.yaml",
        gpus=2,
        gpu="H100",
        plan="ddp over nccl, f32, batch 8",
        steps=steps,
        steps_asked=5,
        exit_code=exit_code,
        findings=findings,
        costs=None,
        memory=Memory(peak=2**20, limit=2**30, estimate=2**21),
        losses=compare([1.0], [None], 1e-4),
    )


def test_the_text_says_what_passed_what_failed_and_what_was_not_reached() -> None:
    text = as_text(rehearsal())
    assert "PASS     races                    none" in text
    assert "1.0 MiB at most on a GPU of 1.0 GiB; the plan estimates 2.0 MiB" in text
    assert text.endswith("result   nothing found that would fail on GPUs")
    failed = Finding(kind="failed", text="boom", place="a.py:1", remedy="mend it", step=1)
    new = Finding(kind="a kind of tomorrow", text="seen", place="b.py:2", step=1)
    text = as_text(rehearsal(failed, new, steps=0, exit_code=1))
    assert "FAIL     runs                     0 of 5 steps, then exit code 1" in text
    assert "         a.py:1: boom (step 1)\n           remedy: mend it" in text
    assert "-        races                    no step was reached" in text
    assert "FAIL     a kind of tomorrow" in text
    assert text.endswith("result   2 findings would fail, or train wrong, on GPUs")
    values = json.loads(as_json(rehearsal(failed)))
    assert values["fails"] is True
    assert values["losses"]["difference"] is None  # infinite, which JSON does not have
    costs = StepCosts(
        operations=0,
        collectives=0,
        collective_bytes=0,
        copies_to_device=0,
        copies_to_host=0,
        own_syncs=0,
    )
    text = as_text(replace(rehearsal(), costs=costs))  # a script that trains on the CPU
    assert text.endswith("result   nothing was rehearsed: no step ran on an emulated GPU")
    slow = Finding(kind="host sync", text="a number is read", place="a.py:3 in loss", times=2)
    text = as_text(rehearsal(slow))
    assert "WARN     host syncs               1 place, 2 a step" in text
    assert "a.py:3 in loss: a number is read (2 a step)" in text
    assert not rehearsal(slow).fails


@pytest.mark.parametrize(
    ("cuda", "hip", "words"),
    [("13.0", None, "built for CUDA 13.0"), (None, "7.1", "built for ROCm 7.1")],
)
def test_a_build_for_gpus_is_refused_with_one_command(
    cuda: str | None, hip: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "torch_build", lambda: TorchBuild("2.13.0", cuda, hip))
    with pytest.raises(UserError, match=words) as raised:
        emulator.check_can_emulate()
    assert "--torch-backend cpu" in raised.value.remedy
    assert f"'torch=={build.TORCH_VERSIONS[-1]}.*'" in raised.value.remedy  # not the newest
    assert "rehearse-venv/bin/samecurve rehearse" in raised.value.remedy


def test_a_machine_without_a_compiler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "torch_build", lambda: TorchBuild("2.13.0+cpu", None, None))
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is built
    with pytest.raises(UserError, match=r"there is no g\+\+") as raised:
        emulator.check_can_emulate()
    assert "apt install g++" in raised.value.remedy


def test_a_full_disk_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rehearsed process fails as it writes, and its own code is blamed."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: SimpleNamespace(free=4096))
    with pytest.raises(RunError, match=r"has 4\.0 KiB free, and what a rehearsal finds is written"):
        emulator.environment_of(emulator.Emulation(), tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["torchrun", "train.py"], "torchrun is no option; a command stands after --"),
        (["--gpu", "B9000", "-f", "a.yaml"], "B9000 is not one of H100"),
        (["--memory", "much", "-f", "a.yaml"], "much must be a number of bytes, or a size"),
        (["--memory", "10", "-f", "a.yaml"], "10 is less than 2.0 MiB, the least that torch takes"),
        (["--memory", "0GB", "-f", "a.yaml"], "0GB is less than 2.0 MiB"),
        (["--gpus", "17", "-f", "a.yaml"], "17 is not in the range 1<=x<=16"),
        (["--lr", "1", "--", "python", "a.py"], "--lr is for a config"),
        (["-f", "a.yaml", "--max-steps", "3"], "'--max-steps'. --steps N says how many steps"),
        (["-f", "a.yaml", "--devices", "0"], "'--devices'. --gpus N says how many"),
        (["--gpus", "2", "--"], "no command stands after --"),
        (["-f", "a.yaml"], "a.yaml"),
        ([], "no config was given"),
        (["--", "no-such-program"], "no-such-program can't be started: No such file"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_anything_starts(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(emulator, "check_can_emulate", lambda: None)
    assert said in refused(monkeypatch, capsys, "rehearse", *words, cwd=tmp_path)


def test_another_engine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulator, "check_can_emulate", lambda: None)
    words = ("--set", "task=timeseries", "--engine", "jax", "--set", "batch.samples=4")
    text = refused(monkeypatch, capsys, "rehearse", *words, cwd=tmp_path)
    assert "rehearse emulates GPUs for engine torch; the config's engine is jax" in text


DAEMON = (
    "import subprocess, sys; subprocess.Popen(['sleep', '613.25']); print('words', file=sys.stderr)"
)


def test_what_a_command_leaves_running_ends_with_it() -> None:
    """It holds the command's stderr, whose end would never come."""
    began = time.monotonic()
    words = [sys.executable, "-c", DAEMON]
    ended = run_child(words, os.environ, output=1, shows_errors=False)
    assert (ended.code, ended.errors) == (0, "words\n")
    assert time.monotonic() - began < 60
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == ["sleep", "613.25"]
    ]
