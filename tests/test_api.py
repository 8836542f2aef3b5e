"""From Python: a notebook trains in fresh processes, can be interrupted, and reads what is left."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import samecurve
from commands import samecurve as command_line
from commands import steps_written, until
from samecurve.errors import UserError

MODEL = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "kv_heads": 2,
    "intermediate_size": 48,
    "max_seq_len": 16,
}


OWN = """
import numpy as np
import torch
from torch import nn

import samecurve
from samecurve import Mean

WIDTH = 4


class Rows:
    def __len__(self):
        return 22

    def __getitem__(self, ids):
        return {"x": (np.stack([ids % 3, ids % 5], 1) / 4).astype(np.float32)}


class MyTask:
    def model(self):
        return nn.Linear(2, WIDTH)

    def loss(self, model, batch):
        x = batch["x"].to(model.weight.dtype)
        return Mean(model(x).square().sum(), len(x))

    def train_data(self):
        return Rows()

    def eval_data(self):
        return Rows()


CONFIG = {"batch": {"samples": 8}, "train": {"steps": 4, "precision": "f64"}}
"""
SCRIPT = """
import sys

print("a script", __name__)
WIDTH = int(sys.argv[1])
run = samecurve.train(MyTask, CONFIG, devices="cpu:2", save_dir="run")
print(run.outcome, len(run.losses))
"""


def config_of(corpus: Path) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": {"source": str(corpus), "validation": 0.1, "eval_samples": 8},
        "batch": {"samples": 10},
        "train": {"steps": 200000, "log_every": 2, "precision": "f64"},
    }


def text_of(cell: nbformat.NotebookNode) -> str:
    return "".join(
        output.get("text", "") for output in cell.outputs if output.output_type == "stream"
    )


def shown_by(cell: nbformat.NotebookNode) -> list[str]:
    """The cell's outputs that are no lines of text, as HTML."""
    outputs = [output for output in cell.outputs if output.output_type == "display_data"]
    return [output["data"]["text/html"] for output in outputs]


@pytest.mark.long
def test_a_notebook(tmp_path: Path, corpus: Path) -> None:
    """Its own process imports no engine.

    The first call is interrupted, the second goes on and ends.
    """
    sources = [
        f"""
import sys, samecurve
config = {config_of(corpus)!r}
plan = samecurve.plan(config, devices='cpu:2')
print(plan.num_devices, plan.global_batch_size, plan)
""",
        "samecurve.train(config, devices='cpu:2', save_dir='run')",
        "print(samecurve.Run('run').outcome)",
        """
steps = len(samecurve.Run('run').losses)
run = samecurve.train(config, save_dir='run', max_steps=steps + 3)
print(len(run.losses) - steps, run.metrics['loss'] > 0, run.outcome, 'torch' in sys.modules)
""",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source.strip()) for source in sources]
    )
    cells = notebook.cells
    client = NotebookClient(
        notebook,
        timeout=200,
        resources={"metadata": {"path": str(tmp_path)}},
        kernel_name="python3",
    )

    async def execute() -> None:
        async with client.async_setup_kernel():
            await client.async_execute_cell(cells[0], 0)
            training = asyncio.create_task(client.async_execute_cell(cells[1], 1))
            while "<polyline" not in "".join(shown_by(cells[1])):  # shown while it trains
                await asyncio.sleep(0.05)
            assert client.km
            await ensure_async(client.km.interrupt_kernel())
            with pytest.raises(
                CellExecutionError, match="holds what was trained, and the same call goes on"
            ):
                await training
            await client.async_execute_cell(cells[2], 2)
            await client.async_execute_cell(cells[3], 3)

    asyncio.run(execute())
    for cell in cells[1], cells[3]:  # one output, updated in place, and no line for each step
        (curve,) = shown_by(cell)
        assert "<progress" in curve
        assert "\nstep " not in text_of(cell)
    assert text_of(cells[0]) == "2 10 <Plan: torch ddp on 2 devices, batch 10, 200000 steps>\n"
    assert text_of(cells[2]) == "stopped\n"
    assert "resume step" in text_of(cells[3])
    assert text_of(cells[3]).endswith("3 True finished False\n")


@pytest.mark.long
def test_a_class_of_a_script_and_of_a_session(tmp_path: Path) -> None:
    """A script without a guard runs once, and its ranks have what it has set. Another session goes
    on with the run; the run directory has the class, wherever it is moved to.
    """
    script = tmp_path / "script.py"
    script.write_text(OWN + SCRIPT)
    command = [sys.executable, str(script), "6"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count("a script") == 1
    assert done.stdout.endswith("finished 4\n")
    script.unlink()
    longer = "WIDTH = 6\nrun = samecurve.train(MyTask, CONFIG, max_steps=6, save_dir='run')"
    code = f"{OWN}{longer}\nprint(run.outcome, len(run.losses), run.plan.num_devices)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "resume step 4" in done.stdout
    assert done.stdout.endswith("finished 6 1\n")
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere" / "moved")
    assert samecurve.load(moved).weight.shape == (6, 2)
    command_line("eval", "moved", "--devices", "cpu:1", cwd=tmp_path / "elsewhere")
    command_line("export", "moved", "--to", "out", cwd=tmp_path / "elsewhere")
    exported = (tmp_path / "elsewhere" / "out").rename(tmp_path / "out")
    assert samecurve.plan(exported / "config.yaml", devices="cpu:2").num_devices == 2


@pytest.mark.long
def test_a_class_of_a_notebook(tmp_path: Path) -> None:
    """Its cells are no files: an error names the cell and its line, and verify has its verdict."""
    wrong = "class Wrong(MyTask):\n    def train_data(self):\n        return [][3]"
    sources = [
        OWN,
        wrong,
        "samecurve.plan(Wrong, CONFIG)",
        "found = samecurve.verify(MyTask, CONFIG, layouts='ddp:2', steps=2)",
        "print(bool(found), [layout['layout'] for layout in found.layouts], found)",
    ]
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    cells[2].metadata["tags"] = ["raises-exception"]
    client = NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=200,
        resources={"metadata": {"path": str(tmp_path)}},
        kernel_name="python3",
    )
    client.execute()
    error = cells[2].outputs[0]
    assert error.ename == "UserError"
    assert error.evalue.startswith("Cell In[2]:3: Wrong.train_data(): IndexError")
    assert "ddp:2" in text_of(cells[3])
    assert "PASS   all 1 layouts" in text_of(cells[3])
    assert text_of(cells[4]) == "True ['ddp:2'] <Verified PASS: ddp:2 PASS>\n"


@pytest.mark.long
def test_a_run_ends_with_the_process_that_began_it(tmp_path: Path, corpus: Path) -> None:
    script = (
        "import samecurve\n"
        f"samecurve.train({config_of(corpus)!r}, devices='cpu:1', save_dir='run', quiet=True)"
    )
    with psutil.Popen([sys.executable, "-c", script], cwd=tmp_path) as process:
        until(lambda: steps_written(tmp_path / "run") > 2)
        children = process.children(recursive=True)
        process.kill()
    assert children
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert samecurve.Run(tmp_path / "run").outcome == "stopped"  # told to, so it has saved


def test_what_can_not_be_honoured_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_: pytest.fail("a process was started"))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"devcies": "cpu"}, "did you mean devices?"),
        ({"lr": "much"}, "not a valid float"),
        ({"set": "a=b"}, "a mapping of config keys"),
    ]
    for flags, message in refused:
        with pytest.raises(UserError, match=message):
            samecurve.train({"batch": {"samples": 2}, "model": {}}, **flags)
    with pytest.raises(
        UserError, match=r"samecurve\.train\(object, ...\): the task's class itself"
    ):
        samecurve.train(object())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"train\(\) is given two configs"):
        samecurve.train({}, {})
    with pytest.raises(UserError, match=r"language in the config, and the class Run beside it"):
        samecurve.verify(samecurve.Run, {"task": "language"})
    with pytest.raises(UserError, match="config:1:1: bathc: unknown key"):
        samecurve.plan({"bathc": {"samples": 2}})
    with pytest.raises(UserError, match="no run directory"):
        samecurve.Run(tmp_path)
    assert not list(tmp_path.iterdir())
