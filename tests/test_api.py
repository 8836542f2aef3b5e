"""From Python: a notebook trains in fresh processes, can be interrupted, and reads what is left."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import samecurve
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
            while "step " not in text_of(cells[1]):  # shown while it trains
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
    assert text_of(cells[0]) == "2 10 <Plan: torch ddp on 2 devices, batch 10, 200000 steps>\n"
    assert text_of(cells[2]) == "stopped\n"
    assert "resume step" in text_of(cells[3])
    assert text_of(cells[3]).endswith("3 True finished False\n")


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
    began = time.monotonic()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"devcies": "cpu"}, "did you mean devices?"),
        ({"lr": "much"}, "not a valid float"),
        ({"set": "a=b"}, "a mapping of config keys"),
    ]
    for flags, message in refused:
        with pytest.raises(UserError, match=message):
            samecurve.train({"batch": {"samples": 2}, "model": {}}, **flags)
    assert time.monotonic() - began < 5
    with pytest.raises(UserError, match="config:1:1: bathc: unknown key"):
        samecurve.plan({"bathc": {"samples": 2}})
    with pytest.raises(UserError, match="no run directory"):
        samecurve.Run(tmp_path)
    assert not list(tmp_path.iterdir())
