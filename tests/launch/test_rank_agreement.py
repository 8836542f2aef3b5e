"""Ranks that run different programs or configs are refused before anything is prepared, with what
differs in words.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest
from torch._C._distributed_c10d import HashStore

from commands import running, write_config
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.protocols import Rank
from samecurve.launch.rank_agreement import check_ranks_agree, differences
from samecurve.probe import probe
from samecurve.worker import from_slurm, meeting
from slurm import free_slurm_job, slurm_variables
from tiny import config_of

OWN = """\
import numpy as np
from torch import nn
from samecurve import Mean

class Own:
    def model(self):
        return nn.Linear(1, 1)
    def loss(self, model, batch):
        return Mean(model(batch["x"]).sum(), len(batch["x"]))
    def train_data(self):
        return [{"x": np.ones(1, np.float32)}] * 8
"""


def test_ranks_of_different_config_and_code_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of a Slurm job, and a process with torch's variables, each with files of its own: both
    leave with 2, one says why, and no run directory is left.
    """
    job = free_slurm_job()
    with ExitStack() as ranks:
        processes = []
        for rank in range(2):
            home = tmp_path / f"host-{rank}"
            home.mkdir()
            (home / "own.py").write_text(OWN + "# changed\n" * rank)
            (home / "own.yaml").write_text(
                f"task: own.py:Own\nbatch: {{samples: {8 - 4 * rank}}}\ntrain: {{steps: 2}}\ndata:"
                f" {{prefetch: {rank + 1}}}\n"
            )
            slurm = {
                **slurm_variables(rank, job),
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_LOCALID": str(rank),
                "SLURM_STEP_NODELIST": "localhost",
            }
            with monkeypatch.context() as environment:
                for name, value in (from_slurm(slurm) if rank else slurm).items():
                    environment.setenv(name, value)
                processes.append(ranks.enter_context(running("train", "-f", "own.yaml", cwd=home)))
        done = [process.end() for process in processes]
    assert [one.returncode for one in done] == [2, 2], done
    said = [one.stdout + one.stderr for one in done]
    cause, remedy = (line for line in said[0].splitlines() if not line.startswith("waiting"))
    assert cause.startswith(
        "error: environment: rank 1 runs something else than rank 0: the file own.py "
    )
    assert cause.endswith("; batch.samples 4 instead of 8")
    assert remedy == "  remedy: the same command, files and installed versions for every rank"
    assert "error" not in said[1]
    assert not list(tmp_path.glob("host-*/runs"))


def test_ranks_that_are_waited_for_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "_SAID", 0.05)
    store = HashStore()
    same = json.dumps({"differs": "", "host": "another", "cores": [0]})
    store.set("samecurve/identity/2", same)
    for index in (1, 3, 4, 5, 6, 7):
        Timer(0.3, store.set, (f"samecurve/identity/{index}", same)).start()
    values = {"task": "language", "batch": {"samples": 8}, "train": {"steps": 1}}
    loaded = LoadedConfig(config_of(values), "tiny", {})
    check_ranks_agree(store, Rank(0, 0, 8, 1), loaded)
    waiting, came = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting for 6 of 8 ranks: 1, 3, 4, 5, 2 more; ")
    assert came.startswith("all 8 ranks came, in ")


def test_differences_are_named() -> None:
    first = {"samecurve": "1", "torch": "2.8.0", "train.steps": "10"}
    assert differences(first, dict(first)) == ""
    assert (
        differences(first, {"samecurve": "1", "torch": "2.13.0", "train.seed": "3"})
        == "torch 2.13.0 instead of 2.8.0; train.steps not there instead of 10; train.seed 3"
        " instead of not there"
    )
    assert differences(first, dict.fromkeys("abcd", "x")).endswith("; and 3 more")


BOUND = """
import os, runpy
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
runpy.run_module("samecurve", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core for two ranks")
def test_ranks_bound_to_a_core_each_are_planned_with_all_of_them(
    corpus: Path, tmp_path: Path
) -> None:
    """As Slurm binds them: else each would plan with the one core that it may use."""
    (tmp_path / "bound.py").write_text(BOUND)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "bound.py"]
    command += ["train", "-f", str(write_config(tmp_path, corpus, 2)), "--save-dir", "run"]
    command += ["--no-exact"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=100)
    plan = json.loads((tmp_path / "run/plan.json").read_text())["plan"]
    assert plan["threads"] == probe().cores // 2
    assert f"{probe().cores} cores for 2 ranks" in plan["because"]["threads"]
