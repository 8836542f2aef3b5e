"""The command with --engine jax: one process for all devices of a host, a run moved to torch and
back, several hosts.
"""

import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from commands import free_port, losses, samecurve, started, steps_written, until, write_config
from samecurve.checkpoint.format import load
from samecurve.errors import START_AGAIN
from slurm import free_slurm_job, slurm_variables

ROOT = Path(__file__).parents[2]


def arrays_agree(one: Path, other: Path, apart: float) -> None:
    first, second = load(one).arrays, load(other).arrays
    assert set(first) == set(second)
    for name, array in first.items():
        np.testing.assert_allclose(second[name], array, rtol=0, atol=apart, err_msg=name)


@pytest.mark.long
def test_a_run_moves_between_engines(unbroken_run: Path, tmp_path: Path, corpus: Path) -> None:
    """torch ddp:2 -> jax:4 -> torch on one, by the same command; fsdp and more moves are in
    tests/test_promise.py.
    """
    train = ["train", "-f", write_config(tmp_path, corpus), "--save-dir", "run"]
    samecurve(*train, "--devices", "cpu:2", "--stop-after", "15", cwd=tmp_path)
    moved = samecurve(
        *train, "--engine", "jax", "--devices", "cpu:4", "--stop-after", "15", cwd=tmp_path
    )
    assert "jax dp over xla" in moved.stdout
    assert "Running on 4 devices (virtual CPU devices)" in moved.stdout
    assert "engine torch -> jax" in moved.stdout
    samecurve(*train, "--devices", "cpu", cwd=tmp_path)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(unbroken_run), rtol=1e-12)
    arrays_agree(
        tmp_path / "run/checkpoints/step-00000060",
        unbroken_run / "checkpoints/step-00000060",
        1e-12,
    )


@pytest.mark.long
@pytest.mark.parametrize("goes_on", [False, True])
def test_hosts_train_together(
    *, goes_on: bool, unbroken_run: Path, tmp_path: Path, corpus: Path
) -> None:
    """Two processes with two devices each; Ctrl-C at one stops both; two tasks of a Slurm job go on
    under another strategy.
    """
    config = write_config(tmp_path, corpus)
    again = (
        "train",
        "-f",
        config,
        "--engine",
        "jax",
        "--devices",
        "cpu:2",
        "--strategy",
        "fsdp",
        "--save-dir",
        "run",
    )

    def train(node: int, port: int, *more: object) -> Sequence[object]:
        return (
            "train",
            "-f",
            config,
            "--engine",
            "jax",
            "--devices",
            "cpu:2",
            "--save-dir",
            "run",
            "--nnodes",
            2,
            "--rdzv",
            f"127.0.0.1:{port}",
            "--node-rank",
            node,
            *more,
        )

    port = free_port()
    with (
        started(*train(0, port), cwd=tmp_path) as first,
        started(*train(1, port), cwd=tmp_path) as second,
    ):
        until(lambda: steps_written(tmp_path / "run") >= 5)
        second.send_signal(signal.SIGINT)
        said = first.communicate(timeout=60)[0]
        assert (first.returncode, second.wait(60)) == (0, 130), said
    assert "plan   world 4   jax dp over xla" in said
    done = steps_written(tmp_path / "run")
    assert 5 <= done < 60
    if not goes_on:
        expected = losses(unbroken_run)[:done]
        np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-12)
        return
    job = free_slurm_job()
    with (
        started(*again, cwd=tmp_path, env=slurm_variables(0, job)) as first,
        started(*again, cwd=tmp_path, env=slurm_variables(1, job)) as second,
    ):
        said = first.communicate(timeout=90)[0]
        assert (first.returncode, second.wait(60)) == (0, 0), said
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(unbroken_run), rtol=1e-12)
    arrays_agree(
        tmp_path / "run/checkpoints/step-00000060",
        unbroken_run / "checkpoints/step-00000060",
        1e-12,
    )


OWN = """\
import os
import jax.numpy as jnp
import numpy as np
from flax import nnx
from samecurve import Mean

class Net(nnx.Module):
    def __init__(self):
        self.p = nnx.Param(jnp.full(2, os.getpid() + 0.5))

class Source:
    def __len__(self):
        return 8
    def __getitem__(self, ids):
        return {"x": np.ones((len(ids), 1), np.float32)}

class Own:
    def __init__(self, model, data): ...
    def model(self):
        return Net()
    def loss(self, model, batch):
        return Mean(model.p[...].sum() * batch["x"].sum(), 1)
    def train_data(self):
        return Source()
"""


@pytest.mark.long
def test_processes_begin_with_the_first_ones_values(tmp_path: Path) -> None:
    """A model that draws its values otherwise in each process: the loss is that of the weights that
    are saved, no mean over two models.
    """
    (tmp_path / "own.py").write_text(OWN)
    train = (
        "train",
        "--set",
        "task=own.py:Own",
        "--engine",
        "jax",
        "--dtype",
        "f64",
        "--devices",
        "cpu:1",
        "--global-batch",
        4,
        "--max-steps",
        1,
        "--lr",
        1e-12,
        "--save-dir",
        "run",
        "--nnodes",
        2,
        "--rdzv",
        f"127.0.0.1:{free_port()}",
        "--node-rank",
    )
    with started(*train, 0, cwd=tmp_path) as first, started(*train, 1, cwd=tmp_path) as second:
        said = first.communicate(timeout=90)[0]
        assert (first.returncode, second.wait(60)) == (0, 0), said
    assert losses(tmp_path / "run") == pytest.approx(
        [float(load(tmp_path / "run/checkpoints/step-00000001").arrays["model/p"].sum())], rel=1e-12
    )


@pytest.mark.long
def test_a_lost_host_ends_the_others_with_a_word(tmp_path: Path, corpus: Path) -> None:
    config, port = write_config(tmp_path, corpus), free_port()
    train = (
        "train",
        "-f",
        config,
        "--engine",
        "jax",
        "--devices",
        "cpu:2",
        "--save-dir",
        "run",
        "--nnodes",
        2,
        "--rdzv",
        f"127.0.0.1:{port}",
        "--max-steps",
        100_000,
        "--node-rank",
    )
    with started(*train, 0, cwd=tmp_path) as first, started(*train, 1, cwd=tmp_path) as second:
        until(lambda: steps_written(tmp_path / "run") >= 25)
        second.kill()
        said = first.communicate(timeout=90)[0]
    assert first.returncode == START_AGAIN, said
    assert "Traceback" not in said
    assert "the same command again" in said


@pytest.mark.long
def test_hosts_end_with_the_verdict_of_the_first(tmp_path: Path) -> None:
    """An error in its code ends the run for good, so no host says that the command may go on."""
    broken = OWN.replace(
        "    def __getitem__(self, ids):\n",
        "    def __getitem__(self, ids):\n"
        '        if "BROKEN" in os.environ and os.path.exists("run/journal.jsonl"):\n'
        '            raise ValueError("a broken row")\n',
    )
    (tmp_path / "own.py").write_text(broken)
    train = (
        *("train", "--set", "task=own.py:Own", "--engine", "jax", "--devices", "cpu:1"),
        *("--global-batch", 4, "--max-steps", 1000, "--lr", 1e-12, "--save-dir", "run"),
        *("--nnodes", 2, "--rdzv", f"127.0.0.1:{free_port()}", "--node-rank"),
    )
    with (
        started(*train, 0, cwd=tmp_path, env={"BROKEN": "1"}) as first,
        started(*train, 1, cwd=tmp_path) as second,
    ):
        said = first.communicate(timeout=90)[0]
        codes = first.returncode, second.wait(60)
    assert "a broken row" in said
    assert codes == (2, 2), said


@pytest.mark.long
def test_the_engines_agree_on_the_example(tmp_path: Path) -> None:
    """models/tiny.yaml in float64 over 30 AdamW steps."""
    for name, more in (
        ("torch", ("--devices", "cpu:2")),
        ("jax", ("--devices", "cpu:4", "--engine", "jax")),
    ):
        samecurve(
            "train",
            "-f",
            ROOT / "models/tiny.yaml",
            "--dtype",
            "f64",
            "--max-steps",
            30,
            "--set",
            "data.eval_samples=8",
            "--save-dir",
            name,
            *more,
            cwd=tmp_path,
            timeout=900,
        )
    np.testing.assert_allclose(losses(tmp_path / "jax"), losses(tmp_path / "torch"), rtol=1e-8)
