"""Bad input: a clear error with a remedy, the right exit code, quickly; no run directory left."""

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from commands import command, refused, running, samecurve, steps_written, until, write_config
from samecurve.core.strategies import STRATEGY_NAMES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "nonsense.key=1"], "nonsense: unknown key"),
        (["--set", "optimizer.lr=fast"], "should be a valid number"),
        (["--set", "optimizer.lr"], "not KEY=VALUE"),
        (["--gpus", "0,9"], "GPU 0, 9 do not exist"),
        (["--gpus", "x"], "neither auto, all, cpu"),
        (["--gpus", "0", "--devices", "cpu"], "both set devices.use"),
        (["--devices", "all"], "no GPU found"),
        (["--sync-backend", "ncl"], "did you mean nccl?"),
        (["--devices", "cpu:2", "--sync-backend", "nccl"], "nccl needs GPUs"),
        (["--strategy", "zero3"], f"is not one of auto, {', '.join(STRATEGY_NAMES)}"),
        (["--devices", "cpu:3", "--strategy", "hsdp"], "3 can't be cut so"),
        (["--devices", "cpu:2", "--compress", "bf16"], "what f64 is for"),
        (
            ["--devices", "cpu:2", "--set", "devices.memory=100MiB"],
            "parameters with their gradients and adamw state need",
        ),
        (["--set", "devices.memory=much"], "a size such as 40GiB"),
        (["--engine", "jax", "--strategy", "ddp"], "strategy ddp is for engine torch"),
        (["--nnodes", "2"], "needs --rdzv HOST:PORT"),
        (["--nnodes", "2", "--rdzv", "here", "--node-rank", "0"], "not HOST:PORT"),
        (["--nnodes", "2", "--rdzv", "here:1", "--node-rank", "2"], "--node-rank 2 of 2 hosts"),
        (["--batch-size", "0"], "greater than 0"),
        (["--grad-accum", "2"], "needs a batch per device"),
        (["--max-steps", "-5"], "number of steps"),
        (["--max-steps", "0"], "whole epochs"),
        (["--epochs", "2", "--max-steps", "5"], "both set train.steps"),
        (["--epochs", "-1"], "number of steps"),
        (["--dtype", "bf15"], "did you mean bf16?"),
        (
            ["--warmup", "0", "--warmup-epochs", "2"],
            "contradict each other: both set schedule.warmup",
        ),
        (["--standalone"], "ranks of one machine meet by themselves"),
        (["--rdzv_endpoint", "a:1"], "--engine jax --nnodes N --rdzv HOST:PORT"),
        (["--nproc_per_node", "2"], "GPU 0, 1 do not exist"),
        (["--nproc_per_node", "gpu"], "no GPU found"),
        (["--master_port", "65536"], "less than or equal to 65535"),
        (["--compile", "--engine", "jax"], "jax compiles its step anyway"),
        (["--set", "train.float8=true"], "no products in eight bits"),
        (["--no-such-flag"], "No such option"),
        (["-d", "missing.txt"], "no such file"),
        (["-d", "missing.bin"], "no data file"),
        (["--set", "data.tokenizer=missing.json"], "no tokenizer file"),
        (["--set", "data.tokenizer=words"], "must be bytes, bpe:N"),
        (["--set", "model.vocab_size=100"], "the tokenizer bytes has 256 tokens"),
        (["--set", "model.num_heads=5"], "not a multiple of num_heads"),
        (["--seq-len", "100000"], "too few for one sample"),
        (["--resume", "nowhere"], "neither a run directory nor a checkpoint"),
        (["--new-batch"], "no checkpoint whose batch"),
    ],
)
def test_refused_with_a_reason_and_nothing_left(
    *,
    arguments: list[str],
    says: str,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, corpus)
    assert says in refused(monkeypatch, capsys, "train", "-f", config, *arguments, cwd=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


def test_refusals_of_the_plan_and_of_the_task_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three faults, one start."""
    (tmp_path / "c.yaml").write_text("task: mine.py:Mine\nbatch: {samples: 4}\n")
    said = refused(
        monkeypatch,
        capsys,
        *("train", "-f", "c.yaml", "--devices", "cpu", "--set", "devices.threads=2"),
        *("--compile", "--engine", "jax", "--set", "track.wandb_project=a/b"),
        *("--set", "track.wandb=offline"),
        cwd=tmp_path,
    )
    for refusal in (
        "devices.threads is for CPU ranks of engine torch",
        "jax compiles its step anyway",
        "mine.py does not exist",
    ):
        assert said.count(refusal) == 1
    assert said.count("error: ") >= 3
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    "model",
    [
        "task: language\nmodel: {hidden_size: 8, num_layers: 1, num_heads: 1}",
        "task: huggingface\nmodel: {architecture: llama}",
    ],
)
def test_files_of_one_task_that_are_missing_come_together(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan` too gives them beside its own refusals."""
    data = "data: {source: no.txt, tokenizer: no/tokenizer.json}"
    (tmp_path / "c.yaml").write_text(f"{model}\n{data}\nbatch: {{samples: 4}}\n")
    said = refused(
        monkeypatch,
        capsys,
        *("plan", "-f", "c.yaml", "--devices", "cpu", "--engine", "jax", "--compile"),
        cwd=tmp_path,
    )
    assert said.count("error: ") == 3
    for refusal in ("jax compiles its step anyway", "no.txt", "no/tokenizer.json"):
        assert said.count(refusal) == 1


def test_flags_alone_are_no_config(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line to type has a config of this directory, else one that came with the program."""
    flags = ["--multi-gpu", "ddp", "--epochs", "20", "--batch-size", "32"]
    for verb in ("train", "plan", "verify", "bench", "profile", "data show"):
        line = f"remedy: samecurve {verb} -f {ROOT}/models/tiny.yaml {' '.join(flags)}; configs"
        assert line in refused(monkeypatch, capsys, *verb.split(), *flags, cwd=tmp_path)
    write_config(tmp_path, corpus)
    (tmp_path / "package.json").write_text('{"name": "other"}')
    said = refused(monkeypatch, capsys, *flags, cwd=tmp_path)
    assert f"samecurve train -f tiny.yaml {' '.join(flags)}; configs at" in said
    assert "package.json" not in said
    said = refused(monkeypatch, capsys, *flags, "--mode", "flatten", cwd=tmp_path)
    assert f"-f {ROOT}/models/har.yaml {' '.join(flags)} --mode flatten; configs at" in said
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".yaml"]
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run", corpus).rename(tmp_path / "run/config.yaml")
    said = refused(monkeypatch, capsys, "train", "--resume", "run", cwd=tmp_path)
    assert "remedy: samecurve train -f run/config.yaml --resume run; configs at" in said


def test_a_flag_for_a_field_that_the_class_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A class that declares no sections takes any field, and would pass over this one."""
    task = tmp_path / "mine.py"
    line = ["plan", "--set", f"task={task}:Mine", "--global-batch", "4", "--mode", "flatten"]
    task.write_text("class Mine:\n    def __init__(self, model, data): self.n = data['count']\n")
    said = refused(monkeypatch, capsys, *line, cwd=tmp_path)
    assert f"--mode flatten: task {task}:Mine reads no data.mode" in said
    said = refused(monkeypatch, capsys, *line, "--set", "data.mode=average", cwd=tmp_path)
    assert "reads no data.mode" not in said
    task.write_text("class Mine:\n    def __init__(self, model, data): self.n = data['mode']\n")
    assert "reads no data.mode" not in refused(monkeypatch, capsys, *line, cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "the corpus is empty"),
        ("short.txt", b"hello", "too few for one sample"),
        ("odd.bin", b"\1\0\0\0\2", "no whole number of uint32 tokens"),
        (
            "high.bin",
            np.full(5000, 300, np.uint32).tobytes(),
            "token id 300; the vocabulary is 256",
        ),
        ("unknown.bin", np.arange(5000, dtype=np.uint32).tobytes(), "vocabulary is not known"),
    ],
)
def test_unfit_data(
    *,
    name: str,
    content: bytes,
    says: str,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    line = ["plan", "-f", write_config(tmp_path, corpus), "-d", name]
    line += ["--set", "model.vocab_size=256"] if name != "unknown.bin" else []
    said = refused(monkeypatch, capsys, *line, cwd=tmp_path)
    assert says in said
    assert "remedy" in said


def test_directories_that_can_not_be_used(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, corpus)

    def says(*arguments: object) -> str:
        return refused(monkeypatch, capsys, "train", "-f", *arguments, cwd=tmp_path)

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert "neither empty nor a run directory" in says(config, "--save-dir", "mine")
    assert "can't be written" in says(config, "--save-dir", "tiny.yaml")
    assert "is a directory" in says("mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param("-o ro", "Read-only file system", marks=pytest.mark.long),
        ("-o size=64k", "a checkpoint needs"),
    ],
)
def test_a_read_only_and_a_full_disk(options: str, says: str, tmp_path: Path, corpus: Path) -> None:
    """In a mount namespace of the test's own: root passes permissions, but not these."""
    config = write_config(tmp_path, corpus)
    train = " ".join(command("train", "-f", config, "--save-dir", tmp_path / "disk" / "run"))
    (tmp_path / "disk").mkdir()

    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no mount namespaces for this user")
    script = (
        f"mount -t tmpfs {options} none {tmp_path / 'disk'} && {train}; code=$?; ls"
        f" {tmp_path / 'disk'}; exit $code"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_disk_that_fills_up_under_a_run(tmp_path: Path, corpus: Path) -> None:
    """Its own word is said though nothing can be written any more, the last checkpoint stays whole,
    and with room again the run goes on.
    """
    config = write_config(tmp_path, corpus, steps=100_000, save=40)
    disk = tmp_path / "disk"
    disk.mkdir()
    train = " ".join(
        command("train", "-f", config, "--save-dir", disk / "run", "--devices", "cpu:2")
    )
    script = f"""mount -t tmpfs -o size=8m none {disk} || exit 77
{train} > {tmp_path}/out 2>&1 &
until ls {disk}/run/checkpoints/step-* > {tmp_path}/seen 2> /dev/null; do sleep 0.05; done
dd if=/dev/zero of={disk}/fill bs=16k 2> /dev/null
wait $!; echo $?; rm {disk}/fill
{train} --stop-after 3 --headless | tail -1"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount namespaces for this user")
    code, last = done.stdout.splitlines()
    said = (tmp_path / "out").read_text()
    assert code == "1"
    assert said.count("error:") == 1
    assert "no space is left on its disk" in said or "no room for the checkpoint" in said
    assert said.splitlines()[-1].startswith("  remedy: free some space")
    assert json.loads(last)["kind"] == "stopped"
    assert json.loads(last)["step"] > 40


READ_ONLY = "mount --bind disk other && mount -o remount,bind,ro other && mount --bind other disk"
NO_INODES = "for i in $(seq 99); do touch disk/$i; done 2> /dev/null"


@pytest.mark.long
@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
@pytest.mark.parametrize(
    ("fault", "cause", "remedy"),
    [
        (READ_ONLY, "disk/run/checkpoints: its file system is read-only", "`dmesg` says why"),
        (NO_INODES, "no inode is left on the file system of ", "remove many small files there"),
        ("mv disk/run disk/moved", "disk/run is missing: removed or renamed", "put it back"),
        ("rm -r disk/run", "disk/run is missing: removed or renamed", "put it back"),
    ],
)
def test_a_disk_that_goes_away_under_a_run(
    *, fault: str, cause: str, remedy: str, devices: str, tmp_path: Path, corpus: Path
) -> None:
    """The screen names the path and the remedy, though neither logs nor lock can be written."""
    config = write_config(tmp_path, corpus, steps=100_000, save=40)
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    train = " ".join(command("train", "-f", config, "--save-dir", "disk/run", "--devices", devices))
    script = f"""mount -t tmpfs -o size=20m,nr_inodes=70 none disk || exit 77
{train} > out 2>&1 &
until ls disk/run/checkpoints/step-* > seen 2> /dev/null; do sleep 0.05; done
{fault}
wait $!; echo $?"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount namespaces for this user")
    said = (tmp_path / "out").read_text()
    assert done.stdout == "1\n", said
    assert said.count("error:") == 1
    assert "Traceback" not in said
    error = said[said.index("error:") :]
    assert cause in error
    assert f"  remedy: {remedy}" in error


def test_a_live_run_keeps_its_directory(tmp_path: Path, corpus: Path) -> None:
    """And SIGTERM is heard in a step at whose end something else is due (here in every one)."""
    config = write_config(tmp_path, corpus, steps=100_000, save=1)
    with running("train", "-f", config, "--save-dir", "run", cwd=tmp_path) as live:
        until(lambda: steps_written(tmp_path / "run") > 3)
        done = samecurve("train", "-f", config, "--save-dir", "run", cwd=tmp_path, code=2)
        assert f"process {live.pid}" in done.stderr
        os.kill(live.pid, signal.SIGTERM)
        ended = live.end()
    assert ended.returncode == 143, ended
    assert "saved" in ended.stdout
