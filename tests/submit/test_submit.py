"""What `submit` writes, what it refuses, and what the script for Slurm does as ranks end."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from commands import refused, samecurve, write_config
from samecurve.errors import RunError, UserError
from samecurve_products.submit.engine import Submission, submit, write
from samecurve_products.submit.job import checked_name

GPUS = ("--gpus-per-node", "8", "--no-plan", "--dry-run")
CPUS = ("--gpus-per-node", "0", "--devices", "cpu:2", "--no-plan", "--dry-run")
STAND_INS = {
    # each call takes the next line of `ends`: an exit code, and a step that is saved before
    "srun": """\
echo "$@" >> calls
read -r code step < ends
sed -i 1d ends
steps=run/checkpoints
[ -n "$step" ] && mkdir -p "$steps/$step" && touch -d "+$(wc -l < calls) s" "$steps/$step"
exit "$code"
""",
    # Slurm ends the script of a job that it queues again
    "scontrol": 'echo "$@" > queued\nkill -TERM $PPID\n',
}


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> Path:
    return write_config(tmp_path, corpus)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> str:
    """The script of a job for two ranks."""
    home = tmp_path_factory.mktemp("script")
    config = write_config(home, corpus)
    words = ("slurm", "-f", config.name, *CPUS, "--lr", "1e-3", "--save-dir", "run")
    samecurve("submit", *words, "--restarts", "2", cwd=home)
    return (home / "run/submit/job.sbatch").read_text()


@pytest.mark.parametrize(
    ("ends", "code", "calls", "queued"),
    [
        pytest.param(["0"], 0, 1, False, id="done"),
        pytest.param(["2"], 2, 1, False, id="a config that can't run is not tried again"),
        pytest.param(["137", "0"], 0, 2, False, id="a killed rank"),
        pytest.param(["1"] * 5, 1, 3, False, id="fails at once, each time"),
        pytest.param(["1 a", "1 b", "1 c", "1 d", "0"], 0, 5, False, id="each start gets further"),
        pytest.param(["143 a"], -15, 1, True, id="the time limit, after a save"),
        pytest.param(["143"], 143, 1, False, id="the time limit, before the first save"),
        pytest.param(["130 a"], 130, 1, False, id="a person"),
    ],
)
def test_the_script_starts_again_what_may_help(
    text: str, ends: list[str], code: int, calls: int, *, queued: bool, tmp_path: Path
) -> None:
    """Beside stand-ins for Slurm's commands; test_slurm_job.py has the real ones."""
    home = tmp_path
    for name, stand_in in STAND_INS.items():
        _write_program(home / "bin" / name, stand_in)
    (home / "ends").write_text("".join(f"{end}\n" for end in ends))
    environment = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=home,
        env=environment,
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == code, done.stderr
    called = (home / "calls").read_text().splitlines()
    assert len(called) == calls
    assert "train -f tiny.yaml --devices cpu:2 --lr 1e-3 --save-dir run" in called[0]
    assert (home / "queued").exists() == queued


def test_the_script_asks_slurm_for_what_the_job_needs(config: Path) -> None:
    words = ("--nodes", "2", "--time", "4:00:00", "--sbatch=--constraint=h100", "--save-dir", "r")
    done = samecurve("submit", "slurm", "-f", config.name, *GPUS, *words, cwd=config.parent)
    text = (config.parent / "r/submit/job.sbatch").read_text()
    assert text in done.stdout
    assert "wrote  r/submit/job.sbatch; nothing is submitted: sbatch " in done.stdout
    asked = {line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {
        *("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=4:00:00"),
        *("--signal=TERM@120", "--requeue", "--open-mode=append", "--constraint=h100"),
        f"--output={config.parent}/r/submit/%j.log",
    }
    assert "trap" not in text  # no work in a signal handler
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=True).returncode == 0


def test_a_yaml_for_skypilot(config: Path) -> None:
    words = ("--nodes", "2", "--gpu-type", "H100", "--volume", "runs:/runs", "--managed")
    setup = ("--setup", "pip install samecurve.whl")
    samecurve("submit", "skypilot", "-f", config.name, *GPUS, *words, *setup, cwd=config.parent)
    job = yaml.safe_load((config.parent / "tiny.sky.yaml").read_text())
    assert (job["num_nodes"], job["resources"]["accelerators"]) == (2, "H100:8")
    assert job["resources"]["job_recovery"] == {"recover_on_exit_codes": [75, 143]}
    assert job["volumes"] == {"/runs": "runs"}
    assert job["setup"] == "pip install samecurve.whl"
    last = shlex.split(job["run"].splitlines()[-1])
    assert last[:6] == ["exec", "python3", "-P", "-m", "samecurve", "train"]
    assert last[-4:] == ["--nnodes", "$SKYPILOT_NUM_NODES", "--rdzv", "$first:29500"]
    assert "/runs/tiny" in last


def test_a_train_job_for_kubernetes(config: Path) -> None:
    words = ("--nodes", "2", "--image", "images/samecurve:1", "--volume", "runs:/runs")
    samecurve("submit", "k8s", "-f", config.name, *GPUS, *words, cwd=config.parent)
    runtime, job = yaml.safe_load_all((config.parent / "tiny.k8s.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "tiny"
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert trainer["command"][-2:] == ["--rdzv", "tiny-node-0-0.tiny:29500"]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    assert "elasticPolicy" not in str(runtime)
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    never, taken = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (never["action"], never["onExitCodes"]["values"]) == ("FailJob", [2])
    assert taken["action"] == "Ignore"
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert trainer["env"] == [{"name": "SAMECURVE_LEAVE_SECONDS", "value": "110"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "-f", "none.yaml", *GPUS], "there is no config file none.yaml"),
        (["slurm", *GPUS, "--nodes", "0"], "'--nodes': 0 is not in the range"),
        (["slurm", *GPUS, "--devices", "cpu:4"], "trains on CPUs (devices.use cpu:4), and the job"),
        (["slurm", *GPUS, "--gpus", "0,1"], "names the GPUs 0,1, and the job asks for 8 GPUs"),
        (["slurm", "--gpus-per-node", "0"], "say how many CPU ranks a machine has"),
        (["slurm", *GPUS, "--sbatch=--array=0-3"], "an array would give one run to several jobs"),
        (["slurm", *GPUS, "--time", "4 hours"], "has a blank"),
        (["skypilot", *GPUS], "SkyPilot looks for machines by their GPU"),
        (["skypilot", *GPUS, "--gpu-type", "H100"], "a fresh machine has no Samecurve"),
        (["skypilot", *GPUS, "--nodes", "2"], "2 machines would each have a run directory"),
        (["skypilot", *GPUS, "--volume", "runs"], "--volume runs is not NAME:/PATH"),
        (["k8s", *GPUS, "--image", "i"], "lies in each pod's own file system"),
        (["ray", *CPUS, "--min-workers", "3"], "--min-workers 3 of 2"),
    ],
)
def test_what_would_not_run_is_refused(
    words: list[str],
    message: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = [] if "-f" in words else ["-f", config.name]
    said = refused(monkeypatch, capsys, "submit", words[0], *file, *words[1:], cwd=config.parent)
    assert message in said
    assert "remedy:" in said


def test_a_config_that_does_not_fit_the_machines_is_refused(config: Path) -> None:
    """The plan for them says so, before anything waits in a queue; no file is left."""
    job = ("--nodes", "2", "--gpus-per-node", "8", "--gpu-type", "H100", "--save-dir", "r")
    large = ("--set", "model.hidden_size=32768", "--set", "model.num_layers=100")
    words = ("slurm", "-f", config.name, *job, *large, "--strategy", "ddp")
    done = samecurve("submit", *words, cwd=config.parent, code=2)
    assert "79.6 GiB" in done.stderr
    assert not (config.parent / "r").exists()


def test_no_sbatch_and_one_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    path = tmp_path / "job.sbatch"
    job = Submission(path=path, text="", argv=("sbatch", str(path)), install="on a login node")
    with pytest.raises(UserError, match="there is no sbatch on this machine"):
        submit(job)
    _write_program(tmp_path / "bin/sbatch", "echo 'invalid partition: x' >&2; exit 3")
    with pytest.raises(RunError, match=r"refused the job \(exit code 3\): invalid partition"):
        submit(job)
    path.write_text("a script of my own")
    with pytest.raises(UserError, match="samecurve submit has not made it"):
        write(job)
    assert path.read_text() == "a script of my own"


def _write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "name"),
    [("My_Run 2", "my-run-2"), ("7b", "run-7b"), ("--", "run"), ("x" * 60, "x" * 40)],
)
def test_names_that_every_engine_takes(text: str, name: str) -> None:
    assert checked_name(text) == name
