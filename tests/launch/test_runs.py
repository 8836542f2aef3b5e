"""Whole runs from the command line: every launcher gives the same curve; stopping and going on
changes nothing.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pexpect
import pytest
from commands import (
    command,
    losses,
    ranks_of,
    refused,
    said,
    samecurve,
    started,
    steps_written,
    until,
    warm,
    write_config,
)

from samecurve.checkpoint.format import load
from samecurve.checkpoint.store import newest
from samecurve.observe.journal import read_events
from worlds import Pool


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run in one process, never stopped."""
    home = tmp_path_factory.mktemp("whole")
    done = samecurve("train", "-f", write_config(home, corpus), "--save-dir", "run", cwd=home)
    assert "done   step 60  60 steps" in done.stdout
    assert "single-token entropy of the corpus" in done.stdout
    return home / "run"


def same(run: Path, other: Path) -> None:
    np.testing.assert_allclose(losses(run), losses(other), rtol=1e-12)
    (first, _), (second, _) = newest(run / "checkpoints"), newest(other / "checkpoints")
    assert first is not None
    assert second is not None
    one, two = load(first).arrays, load(second).arrays
    for name in two:
        np.testing.assert_allclose(one[name], two[name], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["elastic", "spawn"])
def test_other_launchers_give_the_same_run(
    launcher: str, whole: Path, tmp_path: Path, corpus: Path
) -> None:
    done = samecurve(
        "train",
        "-f",
        write_config(tmp_path, corpus),
        "--save-dir",
        "run",
        "--devices",
        "cpu:2",
        "--launcher",
        launcher,
        "--headless",
        cwd=tmp_path,
    )
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert kinds.count("step") == 60
    assert (kinds[0], kinds[-1]) == ("planned", "finished")
    same(tmp_path / "run", whole)
    assert not ranks_of(tmp_path / "run")


def test_torchrun_starts_the_ranks(whole: Path, tmp_path: Path, corpus: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "-m",
        "samecurve",
        "train",
        "-f",
        str(write_config(tmp_path, corpus)),
        "--save-dir",
        "run",
    ]
    done = subprocess.run(
        torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "done   step 60  60 steps" in done.stdout
    same(tmp_path / "run", whole)
    slip = subprocess.run(
        [*torchrun, "--set", "train.stes=3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert slip.returncode == 1
    assert slip.stderr.count("did you mean steps?") == 1


def test_ctrl_c_saves_and_the_same_command_goes_on_elsewhere(
    whole: Path, tmp_path: Path, corpus: Path
) -> None:
    """On a terminal, without --save-dir: stopped on two ranks, gone on with by three.

    A live bar shows progress.
    """
    config = write_config(tmp_path, corpus)
    slow = ["--set", "train.steps=60"]
    arguments = command("train", "-f", config, *slow, "--devices", "cpu:2")
    terminal = pexpect.spawn(
        arguments[0],
        arguments[1:],
        cwd=str(tmp_path),
        timeout=90,
        dimensions=(30, 200),
        encoding="utf-8",
    )
    terminal.expect("step   [0-9]+/60")
    terminal.sendintr()
    terminal.expect("stopping at the end of this step")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
    (run,) = (tmp_path / "runs").iterdir()
    assert [event.kind for event in read_events(run / "journal.jsonl")][-1] == "stopped"
    stopped = steps_written(run)
    assert stopped < 60
    done = samecurve("train", "-f", config, *slow, "--devices", "cpu:3", cwd=tmp_path)
    assert f"resume step {stopped}" in done.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
    same(run, whole)


def test_stop_after_and_what_a_resume_refuses_and_says(
    *,
    pool: Pool,
    whole: Path,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, corpus)
    pool.run(1, warm, tmp_path, "train", "-f", config, "--save-dir", "run", "--stop-after", 25)
    assert steps_written(tmp_path / "run") == 25
    for change, says in (
        ("model.num_layers=3", "num_layers 2 -> 3"),
        ("data.validation=0.2", "validation 0.1 -> 0.2"),
        ("train.seed=1", "began with seed 0"),
        ("optimizer.name=sgd", "adamw -> sgd"),
    ):
        assert says in refused(
            monkeypatch,
            capsys,
            "train",
            "-f",
            config,
            "--save-dir",
            "run",
            "--set",
            change,
            cwd=tmp_path,
        )
    (done,) = pool.run(
        1,
        said,
        tmp_path,
        "train",
        "-f",
        config,
        "--save-dir",
        "run",
        "--global-batch",
        5,
        "--new-batch",
        "--stop-after",
        5,
        "--lr",
        1e-3,
    )
    assert "batch 5 = " in done
    assert "optimizer.lr 0.003 -> 0.001" in done
    twig = (
        "train",
        "-f",
        config,
        "--save-dir",
        "branch",
        "--resume",
        "run/checkpoints/step-00000025",
        "--global-batch",
        5,
    )
    pool.run(1, warm, tmp_path, *twig, "--stop-after", 3)
    (branch,) = pool.run(1, said, tmp_path, *twig)
    assert "resume step 28" in branch
    assert "batch 10 = " in branch
    assert "would need --new-batch" in (tmp_path / "branch/plan.json").read_text()
    assert losses(tmp_path / "branch") == pytest.approx(losses(whole)[25:], rel=1e-12)


def test_a_damaged_checkpoint_is_said_and_the_one_before_gone_on_from(
    pool: Pool, whole: Path, tmp_path: Path, corpus: Path
) -> None:
    config = write_config(tmp_path, corpus)
    pool.run(1, warm, tmp_path, "train", "-f", config, "--save-dir", "run", "--stop-after", 45)
    hurt = tmp_path / "run/checkpoints/step-00000045/rank-0-of-1.safetensors"
    hurt.write_bytes(hurt.read_bytes()[:-50])
    (done,) = pool.run(1, said, tmp_path, "train", "-f", config, "--save-dir", "run")
    assert "step-00000045 is damaged" in done
    assert "resume step 40" in done
    same(tmp_path / "run", whole)


def test_a_live_run_does_what_it_is_asked_for(tmp_path: Path, corpus: Path) -> None:
    """Lines in control.jsonl that name this attempt; all ranks act at one step.

    Lines of another attempt, or none, are passed over.
    """
    config = write_config(tmp_path, corpus, steps=100_000, save=50_000)
    with started(
        "train", "-f", config, "--save-dir", "run", "--devices", "cpu:2", cwd=tmp_path
    ) as live:
        run = tmp_path / "run"
        until(lambda: steps_written(run) > 3)
        attempt = next(
            event.values["attempt"]
            for event in read_events(run / "journal.jsonl")
            if event.kind == "planned"
        )
        with open(run / "control.jsonl", "a") as control:
            control.write(
                "no JSON\n" + json.dumps({"attempt": "another", "request": "stop"}) + "\n"
            )
            control.writelines(
                json.dumps({"attempt": attempt, "request": request}) + "\n"
                for request in ("evaluate", "sample", "save")
            )
        until(lambda: any(event.kind == "saved" for event in read_events(run / "journal.jsonl")))
        with open(run / "control.jsonl", "a") as control:
            control.write(json.dumps({"attempt": attempt, "request": "stop"}) + "\n")
        output, _ = live.communicate(timeout=60)
    assert live.returncode == 0, output
    acted = [
        (event.kind, event.step)
        for event in read_events(run / "journal.jsonl")
        if event.kind in {"evaluated", "sampled", "saved"}
    ]
    assert [kind for kind, _ in acted] == ["evaluated", "sampled", "saved", "saved"]
    assert len({step for _, step in acted}) == 2


def test_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus, steps=100_000)
    with started(
        "train", "-f", config, "--save-dir", "run", "--devices", "cpu:3", cwd=tmp_path
    ) as live:
        until(lambda: steps_written(tmp_path / "run") > 25)
        victim = next(pid for pid in ranks_of(tmp_path / "run") if _rank_of(pid) == 1)
        os.kill(victim, signal.SIGKILL)
        output, _ = live.communicate(timeout=60)
    assert live.returncode == 1
    error = output[output.index("error: ") :].splitlines()
    assert (
        error[0] == "error: rank 1 was ended by SIGKILL; not for want of memory: somebody, or a"
        " scheduler, did"
    )
    assert [line.split(":")[0] for line in error[-2:]] == ["  remedy", "  log"]
    assert output.count("SIGKILL") == 1
    assert not ranks_of(tmp_path / "run")
    assert [event.kind for event in read_events(tmp_path / "run/journal.jsonl")][-1] == "failed"


def test_a_loss_that_is_not_finite_stops_with_its_samples(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus)
    done = samecurve(
        "train",
        "-f",
        config,
        "--save-dir",
        "run",
        "--devices",
        "cpu:2",
        "--lr",
        "1e200",
        "--set",
        "optimizer.clip=0",
        "--set",
        "optimizer.name=sgd",
        cwd=tmp_path,
        code=1,
    )
    assert "not finite" in done.stderr
    assert done.stderr.count("error:") == 1
    warned = [
        event for event in read_events(tmp_path / "run/journal.jsonl") if event.kind == "warned"
    ]
    assert len(warned[-1].values["sample_ids"]) == 10


def _rank_of(pid: int) -> int:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(entry for entry in entries if entry.startswith(b"RANK=")).partition(b"=")[2])


def test_sample_says_the_same_for_the_same_seed(
    pool: Pool,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, other = (
        pool.run(
            1, said, tmp_path, "sample", whole, "--prompt", "the ", "--tokens", 30, "--seed", seed
        )[0]
        for seed in (1, 1, 2)
    )
    assert first == second != other
    assert first.startswith("the ")
    assert "neither a run directory" in refused(
        monkeypatch, capsys, "sample", tmp_path, cwd=tmp_path
    )
