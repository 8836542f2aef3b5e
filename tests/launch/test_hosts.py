"""One run on several machines: `--nnodes` and torchrun give the curve of one process, through lost
ranks, lost machines and machines that come.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from commands import free_port, losses, samecurve, started, steps_written, until
from machines import Machine, machines, needs_machines
from samecurve.checkpoint.format import load
from samecurve.observe import read_events

PORT = 29500
# a step takes 30 ms, so that something can happen to a run
TASK = """\
import time
import numpy as np
from torch import nn
from samecurve import Mean

class Rows:
    def __len__(self):
        return 120
    def __getitem__(self, ids):
        time.sleep(0.03)
        ids = np.asarray(ids) + 1.0
        return {"x": np.sin(np.outer(ids, np.arange(1, 9))), "y": np.cos(37 * ids)[:, None]}

class Task:
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    def loss(self, model, batch):
        return Mean(((model(batch["x"]) - batch["y"]) ** 2).sum(), len(batch["x"]))
    def train_data(self):
        return Rows()
"""
CONFIG = """\
task: own.py:Task
batch: {{samples: 10}}
optimizer: {{lr: 1.0e-2}}
train: {{steps: {steps}, precision: f64, save_every: 20}}
devices: {{use: cpu, hang_floor: 20}}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(TASK)
    return tmp_path


def config(home: Path, steps: int = 300) -> Path:
    (home / "own.yaml").write_text(CONFIG.format(steps=steps))
    return home / "own.yaml"


def alone(home: Path) -> Path:
    """The same run in one process, never stopped."""
    samecurve("train", "-f", home / "own.yaml", "--save-dir", "alone", cwd=home, timeout=400)
    return home / "alone"


def check_equal(run: Path, other: Path) -> None:
    """The losses of all steps, and the last parameters."""
    np.testing.assert_allclose(losses(run), losses(other), rtol=1e-12)
    ours, theirs = (
        load(sorted((home / "checkpoints").glob("step-*"))[-1]).arrays for home in (run, other)
    )
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        np.testing.assert_allclose(theirs[name], array, rtol=1e-12, atol=1e-12, err_msg=name)


def train(home: Path, nodes: str, *more: object) -> Sequence[object]:
    return (
        "train",
        "-f",
        home / "own.yaml",
        "--save-dir",
        "run",
        "--nnodes",
        nodes,
        *more,
    )


def reached(home: Path, step: int) -> None:
    until(lambda: steps_written(home / "run") >= step, 120)


def test_two_agents_train_as_one_process(home: Path) -> None:
    """On one machine, over its loopback: both leave with 0; a second start has nothing to do."""
    config(home, steps=20)
    words = train(home, "2", "--rdzv", f"127.0.0.1:{free_port()}")
    with started(*words, cwd=home) as first, started(*words, cwd=home) as second:
        said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert sum("plan   world 2   ddp over gloo" in text for text in said) == 1, said
    check_equal(home / "run", alone(home))


@pytest.mark.long
def test_an_end_for_good_waits_for_no_lost_host(home: Path) -> None:
    """torch's agent would wait five minutes for the other one, which answers no more."""
    bad = "+ (float('nan') if __import__('os').path.exists('bad') else 0)"
    (home / "own.py").write_text(TASK.replace(".sum()", f".sum() {bad}"))
    config(home)
    words = train(home, "2", "--rdzv", f"127.0.0.1:{free_port()}", "--node-rank")
    with started(*words, 0, cwd=home) as first, started(*words, 1, cwd=home) as second:
        reached(home, 5)
        second.send_signal(signal.SIGSTOP)
        (home / "bad").touch()
        said = first.communicate(timeout=60)[0]
        second.send_signal(signal.SIGCONT)
        second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (1, 1), said
    assert "not finite" in said


@pytest.mark.long
@needs_machines()
@pytest.mark.parametrize("how", ["nnodes", "torchrun", "exact"])
def test_machines_train_as_one_process(how: str, home: Path) -> None:
    """By our launcher, by torchrun as its manual starts it, and to the bit in f32."""
    config(home, steps=60)
    more = ["--exact", "--dtype", "f32"] if how == "exact" else []
    with machines(2, home) as nodes:
        place = f"{nodes[0].address}:{PORT}"
        processes = []
        for node in nodes:
            words = train(home, "2", "--rdzv", place, *more)
            if how == "torchrun":
                processes.append(node.start_command(torchrun(home, place), cwd=home, names=True))
            else:
                processes.append(node.start(*words, cwd=home))
        said = [process.communicate(timeout=180)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    if how == "exact":
        samecurve("train", "-f", "own.yaml", "--save-dir", "alone", *more, cwd=home)
        assert losses(home / "run") == losses(home / "alone")
        return
    check_equal(home / "run", alone(home))


def torchrun(home: Path, place: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", place),
        *("-m", "samecurve"),
        *("train", "-f", str(home / "own.yaml"), "--save-dir", "run"),
    ]


@pytest.mark.long
def test_a_signal_to_one_machine_stops_both(home: Path) -> None:
    """All save and leave together, at once; the same command goes on."""
    config(home)
    words = train(home, "2", "--rdzv", f"127.0.0.1:{free_port()}")
    with started(*words, cwd=home) as first, started(*words, cwd=home) as second:
        reached(home, 30)
        second.send_signal(signal.SIGINT)
        said = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert sorted((first.returncode, second.returncode)) == [0, 130], said
    assert any("; --resume run goes on from here" in text for text in said), said
    with started(*words, cwd=home) as first, started(*words, cwd=home) as second:
        said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    check_equal(home / "run", alone(home))


@pytest.mark.long
def test_a_batch_per_device_needs_a_fixed_number_of_machines(home: Path) -> None:
    """Which machines come first would decide the batch, and with it the curve."""
    config(home, steps=20)
    path = home / "own.yaml"
    path.write_text(path.read_text().replace("samples: 10", "per_device: 5"))
    place = f"127.0.0.1:{free_port()}"
    done = samecurve(*train(home, "1:2", "--rdzv", place), cwd=home, code=2, afresh=True)
    assert "error: batch.per_device: 5 on each device: with --nnodes MIN:MAX" in done.stderr
    assert "remedy: --global-batch N; 5 is what these devices would take" in done.stderr
    assert not (home / "run").exists()


@pytest.mark.long
@needs_machines()
def test_a_killed_rank_costs_seconds(home: Path) -> None:
    config(home)
    with machines(2, home) as nodes:
        words = train(home, "2", "--rdzv", f"{nodes[0].address}:{PORT}", "--max-restarts", 3)
        processes = [node.start(*words, cwd=home) for node in nodes]
        reached(home, 70)
        [rank] = nodes[1].ranks()
        killed = time.time()
        os.kill(rank, signal.SIGKILL)
        said = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    check_equal(home / "run", alone(home))
    print(f"trained again {first_step_after(home, killed) - killed:.1f} s after the kill")


@pytest.mark.long
@pytest.mark.timeout(1200)
@needs_machines()
def test_machines_leave_and_come(home: Path) -> None:
    """Two machines; one is lost, and the other goes on alone; the lost one comes back, and one more
    leaves in order: one curve.
    """
    config(home, steps=900)
    with machines(2, home) as nodes:
        words = train(home, "1:2", "--rdzv", f"{nodes[0].address}:{PORT}")
        first, second = (node.start(*words, cwd=home) for node in nodes)
        reached(home, 100)
        nodes[1].power_off()
        lost = time.time()
        again = first_step_after(home, lost)
        assert second.wait(10) != 0
        reached(home, steps_written(home / "run") + 60)
        nodes[1].mend()
        third = nodes[1].start(*words, cwd=home)
        until(lambda: starts(home) >= 3, 120)
        first_step_after(home, time.time())
        reached(home, steps_written(home / "run") + 60)
        third.send_signal(signal.SIGTERM)
        left = third.communicate(timeout=60)[0]
        assert "left   the others go on" in left, left
        said = first.communicate(timeout=240)[0]
        assert first.returncode == 0, said
    check_equal(home / "run", alone(home))
    worlds = re.findall(r"plan   world (\d)", said)
    print(f"alone {again - lost:.1f} s after the loss; worlds, as node0 saw them: {worlds}")
    assert starts(home) == 4


def starts(home: Path) -> int:
    return sum(event.kind == "started" for event in read_events(home / "run/journal.jsonl"))


def first_step_after(home: Path, moment: float) -> float:
    """When the first step after a moment was logged."""

    def steps() -> list[float]:
        events = read_events(home / "run/journal.jsonl")
        return [event.time for event in events if event.kind == "step" and event.time > moment + 1]

    until(lambda: bool(steps()), 120)
    return steps()[0]


@pytest.mark.long
@pytest.mark.timeout(1200)
@needs_machines()
def test_a_partition_is_survived(home: Path) -> None:
    """The network between two machines is cut for 12 s; both go on from the last save."""
    config(home, steps=400)
    with machines(2, home) as nodes:
        words = train(home, "2", "--rdzv", f"{nodes[0].address}:{PORT}", "--max-restarts", 3)
        processes = [node.start(*words, cwd=home) for node in nodes]
        reached(home, 60)
        nodes[1].cut()
        time.sleep(12)
        nodes[1].mend()
        said = [process.communicate(timeout=300)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    check_equal(home / "run", alone(home))


@pytest.mark.long
@needs_machines()
def test_machines_that_differ_are_refused(home: Path) -> None:
    """A run directory that they don't share; another config; a name that nobody knows; a wrong
    number.
    """
    config(home, steps=20)
    with machines(2, home) as nodes:
        place = f"{nodes[0].address}:{PORT}"
        other = home / "elsewhere"
        other.mkdir()
        for name in ("own.py", "own.yaml"):
            (other / name).write_text((home / name).read_text())
        said = run_both(nodes, [home, other], place)
        assert "node1 does not see what node0 writes into run" in said[0], said
        assert not (home / "run").exists()
        changed = (home / "own.yaml").read_text().replace("samples: 10", "samples: 12")
        (other / "own.yaml").write_text(changed)
        said = run_both(nodes, [home, other], place)
        assert "batch.samples 12 instead of 10" in said[0], said
        words = ("train", "-f", "own.yaml", "--nnodes", "2", "--rdzv", "nowhere:29500")
        said = [nodes[0].start(*words, cwd=home).communicate(timeout=60)[0]]
        assert "does not know the name nowhere" in said[0]


@pytest.mark.long
def test_a_newcomer_that_differs_is_refused_alone(home: Path) -> None:
    """Another config, then other code: it leaves with 2, and the run never hears of it."""
    config(home, steps=5000)
    other = home / "elsewhere"
    other.mkdir()
    text, code = ((home / name).read_text() for name in ("own.yaml", "own.py"))
    place = f"127.0.0.1:{free_port()}"
    words = train(home, "1:2", "--rdzv", place)
    abroad = ("train", "-f", "own.yaml", "--save-dir", home / "run", *words[5:])
    with started(*words, cwd=home) as first:
        reached(home, 30)
        for config_text, code_text, difference in (
            (text.replace("samples: 10", "samples: 12"), code, "batch.samples 12 instead of 10"),
            (text, f"{code}\n# changed\n", "the file own.py"),
        ):
            (other / "own.yaml").write_text(config_text)
            (other / "own.py").write_text(code_text)
            with started(*abroad, cwd=other) as newcomer:
                said = newcomer.communicate(timeout=120)[0]
            assert newcomer.returncode == 2, said
            assert difference in said, said
            assert "the run goes on without this one" in said, said
        reached(home, steps_written(home / "run") + 20)
        first.send_signal(signal.SIGTERM)
        assert first.communicate(timeout=60)[0].count("plan   world 1") == 1
    assert first.returncode == 128 + signal.SIGTERM
    assert starts(home) == 1


def run_both(nodes: Sequence[Machine], homes: Sequence[Path], place: str) -> list[str]:
    words = ("train", "-f", "own.yaml", "--save-dir", "run", "--nnodes", "2", "--rdzv", place)
    processes = [node.start(*words, cwd=home) for node, home in zip(nodes, homes, strict=True)]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    return said
