"""What `samecurve` alone prints: this machine, and commands that work in this directory."""

import json
import os
import re
import shlex
import shutil
import socket
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from commands import samecurve, write_config
from samecurve.cli import greeting
from samecurve.cli.main import cli
from samecurve.core.planning.machine import Device, Machine, UnfitEngine
from samecurve.errors import UserError

ROOT = Path(__file__).parents[2]


def greeted() -> str:
    """The greeting, which is short and plain."""
    done = CliRunner().invoke(cli, [])
    assert done.exit_code == 0
    assert done.output.replace("\n", "").isprintable()
    assert len(done.output.splitlines()) <= 12
    return done.output


def commands_of(text: str) -> list[list[str]]:
    """The words of each command that is proposed, as a shell reads them."""
    lines = re.sub(r"\\\n +", "", text.partition("\ntry")[2]).splitlines()
    return [shlex.split(line.strip().partition("  ")[0]) for line in lines]


def test_a_directory_without_a_run_begins_with_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train, help_line = ["samecurve", "train", "-f", "models/tiny.yaml"], ["samecurve", "--help"]
    assert commands_of(greeted()) == [["samecurve", "examples"], train, help_line]
    (tmp_path / "models").mkdir()
    shutil.copy(ROOT / "models/tiny.yaml", tmp_path / "models")
    plan = ["samecurve", "plan", *train[2:]]
    assert commands_of(greeted()) == [train, plan, help_line]


def test_the_line_for_a_run_that_stopped_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    """The newest run of several. While a run trains, and once it has finished, it is looked at."""
    run, older = tmp_path / "runs/a b", tmp_path / "runs/older"
    options = ("--devices", "cpu:1", "--stop-after", "2")
    samecurve(
        "train", "-f", write_config(tmp_path, corpus), *options, "--save-dir", run, cwd=tmp_path
    )
    older.mkdir()
    (older / "plan.json").touch()
    os.utime(older / "plan.json", (0, 0))
    monkeypatch.chdir(tmp_path)
    go_on, report, _ = commands_of(greeted())
    assert report == ["samecurve", "report", "runs/a b"]
    done = samecurve(*go_on[1:], "--stop-after", "2", cwd=tmp_path)
    assert "resume step 2  from runs/a b/checkpoints/step-00000002" in done.stdout

    own = psutil.Process()
    process = {"pid": own.pid, "host": socket.gethostname(), "since": own.create_time()}
    (run / "logs/process-0.json").write_text(json.dumps(process))
    assert commands_of(greeted())[0] == report
    (run / "logs/process-0.json").unlink()
    assert commands_of(greeted())[0] == go_on
    (run / "results.json").write_text("{}")
    assert commands_of(greeted())[0] == report


def test_gpus_are_counted_and_what_keeps_them_idle_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gpus = [
        Device(kind="cuda", index=index, name=f"NVIDIA {name}", memory=size << 30)
        for index, (name, size) in enumerate([("H200", 140), ("H200", 140), ("A100", 80)])
    ]
    unfit = {"torch": UnfitEngine("torch is built without CUDA", "install another build")}
    machine = Machine(devices=tuple(gpus), links=(), host_bytes=1, cores=1, unfit=unfit)
    monkeypatch.setattr(greeting, "probe", lambda: machine)
    said = greeted()
    assert (
        "\n       2 x NVIDIA H200, 140.0 GiB each\n       1 x NVIDIA A100, 80.0 GiB each\n" in said
    )
    assert "\nwarn   torch is built without CUDA. Remedy: install another build\n" in said

    def refuse() -> Machine:
        raise UserError("CUDA_VISIBLE_DEVICES names GPU 7", "one of 0, 1")

    monkeypatch.setattr(greeting, "probe", refuse)
    assert "\nwarn   CUDA_VISIBLE_DEVICES names GPU 7. Remedy: one of 0, 1\n" in greeted()
