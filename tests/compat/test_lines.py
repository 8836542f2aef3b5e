"""The command lines of the origins' guides, as they are typed there but for the program's name: on
eight GPUs (a stand-in for their driver) each is planned as its guide says, without GPUs it is
refused for want of them and nothing else, and with CPU ranks in their place it is planned again.
A line without a config is shown the configs of its task.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import nvml
from commands import losses, refused, samecurve
from samecurve.cli.main import main
from samecurve.observe import read_events

ROOT = Path(__file__).parents[2]
RUN_ONLY = {
    "--headless": 0,
    "--resume": 1,
    "--save-dir": 1,
    "--checkpoint_dir": 1,
}  # flags of train, and how many words follow them

PLANNED = {
    # A: Oxidizr, several GPUs
    "-f models/nano.yaml --gpus 0,1": [
        "world 2   ddp over nccl",
        "batch 16 = 2 devices x 4 x 2 rounds",
        "Running on 2 devices (multi-GPU enabled)",
    ],
    "train -f models/nano.yaml --gpus 0,1,2,3": [
        "world 4   ddp over nccl",
        "batch 32 = 4 devices x 4 x 2 rounds",
    ],
    "-f models/nano.yaml --gpus 0,1 --sync-backend cpu": ["world 2   ddp over gloo"],
    "-f models/nano.yaml --gpus 0,1,2,3 --sync-backend nccl --dtype bf16": [
        "world 4   ddp over nccl   bf16"
    ],
    "-f models/large.yaml --gpus 0,1,2,3,4,5,6,7 --sync-backend nccl --dtype bf16 --prefetch 4": [
        "world 8   ddp over nccl   bf16",
        "data.prefetch = 4",
    ],
    "-f models/nano.yaml --gpus 2,3": [
        "NVIDIA H200 no. 2, NVIDIA H200 no. 3; 2 of 8 visible devices, as asked"
    ],
    "CUDA_VISIBLE_DEVICES=2,3 -f models/nano.yaml --gpus 0,1": [
        "NVIDIA H200 no. 2, NVIDIA H200 no. 3; 2 of 2 visible devices, as asked"
    ],
    (
        "-f models/nano.yaml --gpus 0,1 --batch-size 2 --grad-accum 4 --seq-len 256 "
        "--max-steps 1000 --headless --resume auto --max-checkpoints 10"
    ): [
        "batch 16 = 2 devices x 2 x 4 rounds",
        "1000 steps of 16 samples",
        "model.max_seq_len = 256",
        "train.keep = 10",
    ],
    # B: OneTrainer's launcher
    "train --config-path=models/nano.yaml --num-gpus=2 --distributed-backend=nccl": [
        "world 2   ddp over nccl"
    ],
    (
        "train --config-path models/nano.yaml --num-gpus 0 --spawn --port 29533 "
        "--distributed-backend gloo --distributed-data-loading"
    ): [
        "world 8   ddp over gloo",
        "devices.launcher = spawn",
        "devices.port = 29533",
        "always so",
    ],
    # C: the HAR guide, what of it is not of its task
    "train -f models/nano.yaml --multi-gpu dp --batch-size 32": [
        "world 8   dp",
        "batch 512 = 8 devices x 32 x 2 rounds",
    ],
    (
        "train -f models/nano.yaml --multi-gpu dp --backend auto --gpu-ids 0,1,3 "
        "--grad-accum-steps 1 --batch-size 32 --lr 2e-3 --save-dir runs/dp_3gpu"
    ): [
        "world 3   dp",
        "batch 96 = 3 devices x 32 x 1 round",
        "lr 0.002",
    ],
    (
        "CUDA_VISIBLE_DEVICES=0,1,2,3 train -f models/nano.yaml --multi-gpu ddp --batch-size 16 "
        "--grad-accum-steps 4 --epochs 30 --lr 4e-3 --warmup-epochs 3 --weight-decay 1e-4 "
        "--num-workers 4 --no-amp --save-dir runs/4gpu"
    ): [
        "batch 256 = 4 devices x 16 x 4 rounds",
        "lr 0.004",
        "schedule.warmup = 3ep",
        "optimizer.weight_decay = 0.0001",
        "data.workers = 4",
        "train.precision = f32",
    ],
    # C: with its task
    (
        "train -f models/har.yaml --multi-gpu ddp --mode flatten --epochs 20 --batch-size 32 "
        "--lr 4e-3 --warmup-epochs 2 --num-workers 4 --nproc 4 --save-dir checkpoints/ddp_4gpu"
    ): [
        "world 4   ddp over nccl",
        "batch 128 = 4 devices x 32 x 1 round",
        "data.mode = flatten",
    ],
    "train -f models/har.yaml --multi-gpu dp --gpu-ids 0,1,3 --batch-size 32": [
        "world 3   dp   bf16",
        "batch 96 = 3 devices x 32 x 1 round",
    ],
    "train -f models/har.yaml --multi-gpu dp --gpu-ids 0,1,3 --no-amp": ["world 3   dp   f32"],
    # D: CSSM, what of it is not of its task
    (
        "CUDA_VISIBLE_DEVICES=0,1,2,3 train -f models/nano.yaml --batch_size 64 --grad_accum 1 "
        "--bf16 --checkpoint_dir /local/scratch/checkpoints"
    ): [
        "batch 256 = 4 devices x 64 x 1 round",
        "bf16",
        "Running on 4 devices (multi-GPU enabled)",
    ],
    "train -f models/nano.yaml --engine jax --device-ids 0,1 --bf16": ["world 2   jax dp"],
    # D: with its task
    (
        "CUDA_VISIBLE_DEVICES=0,1,2,3 train -f models/cssm.yaml --arch vit --cssm hgru_bi "
        "--batch_size 64 --bf16 --checkpoint_dir /local/scratch/checkpoints "
        "--set model.depth=1 --set data.samples=100 --set data.cached=false"
    ): [
        "world 4   jax dp over xla   bf16",
        "batch 256 = 4 devices x 64 x 1 round",
        "model.cssm = hgru_bi",
        "Running on 4 devices (multi-GPU enabled)",
    ],
    # E: TPrimat: 64 samples whatever the GPUs
    (
        "train -f models/nano.yaml --global-batch 64 --batch-size 1 --dtype bf16 --seq-len 2048 "
        "--weight-decay 0.1"
    ): [
        "batch 64 = 8 devices x 1 x 8 rounds (batch.samples, whatever the devices, at most 1 at"
        " once)"
    ],
    (
        "train -f models/nano.yaml --nproc 4 --strategy fsdp --global-batch 64 --batch-size 1 "
        "--dtype bf16"
    ): [
        "world 4   fsdp",
        "batch 64 = 4 devices x 1 x 16 rounds",
    ],
}

PROGRAM = (
    nvml.ENGINES
    + """
import contextlib, io, json, os, sys
from samecurve.cli.main import main
from samecurve.run import describe
from samecurve.processes import ForkServer
server = ForkServer(["torch", "samecurve.tasks.adapter.torch_adapter"])  # imports torch once
describe_task = describe._in_subprocess
describe._in_subprocess = lambda config, cache, _: describe_task(config, cache, server)
screens = []
for environment, arguments in json.load(sys.stdin):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(environment)
    sys.argv = ["samecurve", *arguments]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main()
        except SystemExit as left:
            text.write(f"exit {left.code}")
    screens.append(text.getvalue())
json.dump(screens, sys.stdout)
"""
)


def split(line: str) -> tuple[dict[str, str], list[str]]:
    """'NAME=VALUE train ...' -> the variables, and the arguments of train (which may be left
    unsaid).
    """
    words = shlex.split(line)
    variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    rest = words[len(variables) :]
    return variables, rest if rest[0] == "train" else ["train", *rest]


def as_plan(arguments: list[str], *more: str) -> list[str]:
    """The same, for `plan`."""
    words, skip = ["plan"], 0
    for word in arguments[1:]:
        if skip:
            skip -= 1
        elif word in RUN_ONLY:
            skip = RUN_ONLY[word]
        else:
            words.append(word)
    return [*words, *more]


def has_data(arguments: Iterable[str]) -> bool:
    """Whether the line's config names its data, or makes it."""
    return bool({"models/har.yaml", "models/cssm.yaml"}.intersection(arguments))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough for samples of 2048 tokens."""
    path = tmp_path_factory.mktemp("text") / "primes.txt"
    path.write_text(
        "".join(
            f"{i} has the divisors {[d for d in range(2, 40) if i % d == 0]}.\n"
            for i in range(2000)
        )
    )
    return path


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory, text: Path) -> dict[str, str]:
    """What each line's plan says on a machine of eight GPUs, in one process for all."""
    of_text = ["-d", str(text)]
    lines = [
        (variables, as_plan(arguments, "--keys", *([] if has_data(arguments) else of_text)))
        for variables, arguments in map(split, PLANNED)
    ]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(nvml.library(tmp_path_factory.mktemp("nvml"), 8)),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(lines),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(PLANNED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", PLANNED)
def test_planned_as_the_guide_says(line: str, on_gpus: dict[str, str]) -> None:
    screen = re.sub(r" +(?== )", " ", on_gpus[line])
    for words in PLANNED[line]:
        key, is_row, value = words.partition(" = ")
        if is_row and "." in key:  # of the table of config values: key, from, value
            assert re.search(rf"{re.escape(key)} +\S.* {re.escape(value)}\b", on_gpus[line]), words
        else:
            assert words in screen


@pytest.mark.parametrize("line", PLANNED)
def test_without_a_gpu_only_the_gpu_is_missing(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    _, arguments = split(line)
    named = any(
        word.startswith(("--gpus", "--gpu-ids", "--device-ids", "--num-gpus", "--nproc"))
        for word in arguments
    )
    more = [] if named else ["--devices", "all"]
    error = refused(monkeypatch, capsys, *arguments, *more, cwd=ROOT)
    assert error.count("error:") == 1
    assert re.search(r"GPU [\d, ]+ do(es)? not exist|no GPU found", error)
    assert "--devices cpu" in error
    without = re.sub(
        r"(--gpus|--gpu-ids|--device-ids|--num-gpus|--nproc|--sync-backend|--distributed-backend)[="
        r" ]\S+",
        "",
        " ".join(arguments),
    )
    small = f"-d {text} --set model.num_layers=1 --set model.hidden_size=192".split()
    small = [] if has_data(arguments) else small
    planned = as_plan(without.split(), "--devices", "cpu:2", *small)
    monkeypatch.setattr(sys, "argv", ["samecurve", *planned])
    main()
    assert "plan   world 2 " in capsys.readouterr().out


def test_a_line_with_the_flags_of_a_task_is_shown_its_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "--arch vit --cssm hgru_bi --bf16 --batch_size 256 --lr 1e-4 --epochs 300"
        " --checkpoint_dir /local/scratch/checkpoints"
    )
    error = refused(monkeypatch, capsys, *split(line)[1], cwd=tmp_path)
    assert "no config was given" in error
    assert f"{ROOT}/models/cssm.yaml" in error
    assert "nano.yaml" not in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "--multi-gpu ddp --mode flatten --epochs 20 --batch-size 32 --lr 4e-3 --warmup-epochs 2",
        "--multi-gpu dp --gpu-ids 0,1,3 --mode average --epochs 20",
    ],
)
def test_lines_of_a_task_are_given_its_config(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refused(monkeypatch, capsys, *split(line)[1], cwd=tmp_path)
    assert f"remedy: samecurve train -f {ROOT}/models/har.yaml {line}; configs" in error
    assert error.count("error:") == 1
    assert not list(tmp_path.iterdir())


def test_whole_epochs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], corpus: Path
) -> None:
    """`--max-steps 0`: as many as the config or --epochs says; a config that counts steps says
    none.
    """
    line = ["-f", "models/nano.yaml", "-d", str(corpus), "--max-steps", "0"]
    assert "whole epochs" in refused(monkeypatch, capsys, "plan", *line, cwd=ROOT)
    monkeypatch.setattr(sys, "argv", ["samecurve", "plan", *line, "--set", "train.steps=2ep"])
    main()
    assert "train.steps 2ep" in capsys.readouterr().out


def test_one_of_them_is_run_stopped_and_gone_on_with(tmp_path: Path, corpus: Path) -> None:
    """Flags of all five at once, typed again with --resume auto to go on."""
    line = f"""-f models/tiny.yaml -d {corpus} --devices cpu:2 --multi-gpu dp --seq-len 16
               --batch_size 2 --grad-accum-steps 2 --lr 1e-3 --weight-decay 0.1
               --warmup-epochs 0.1 --max-steps 6 --set model.num_layers=1 --bf16 --prefetch 4
               --max-checkpoints 2 --headless --distributed-data-loading
               --checkpoint_dir {tmp_path / "run"}"""
    samecurve(*shlex.split(line), "--stop-after", 3, cwd=ROOT)
    samecurve(*shlex.split(line), "--resume", "auto", cwd=ROOT)
    assert len(losses(tmp_path / "run")) == 6
    planned = [
        event.values["plan"]
        for event in read_events(tmp_path / "run/journal.jsonl")
        if event.kind == "planned"
    ]
    assert [
        (plan["strategy"], plan["batch"], plan["rounds"], plan["precision"]) for plan in planned
    ] == [("dp", 8, 2, "bf16")] * 2
