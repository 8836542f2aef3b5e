"""The notebooks of examples/notebooks: as they are committed, and executed on CPU ranks."""

import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

HOME = Path(__file__).parents[1] / "examples/notebooks"
DEVICES = {"one-gpu": "auto", "two-gpus": "cpu:2"}  # on a machine without GPUs


@pytest.mark.parametrize("name", DEVICES)
def test_it_is_committed_without_outputs(name: str) -> None:
    notebook = nbformat.read(HOME / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert [cell for cell in notebook.cells if cell.get("outputs")] == []
    (parameters,) = (
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())
    )
    assert parameters.source.startswith('devices = "auto"')


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a cell prints and returns, in one line."""
    texts = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.get("outputs", ())
    ]
    return " ".join(" ".join(texts).split())


@pytest.mark.long
@pytest.mark.parametrize("name", DEVICES)
def test_it_runs_on_cpu_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Path(sys.executable).parent  # `!samecurve` is looked for on the path
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    shutil.copy(HOME / f"{name}.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source = f"devices = {DEVICES[name]!r}"
    NotebookClient(
        notebook,
        timeout=600,
        resources={"metadata": {"path": str(tmp_path)}},
        kernel_name="python3",
    ).execute()
    shown = {cell.id: text_of(cell) for cell in notebook.cells}
    assert "0 FAIL" in shown["check"]
    if name == "one-gpu":
        assert "stopped" in shown["train"]
        assert "('finished', 200," in shown["resume"]
        assert "[" in shown["use"]
    else:
        assert "Verified PASS" in shown["verify"]
        assert "2 1 largest relative difference" in shown["same"]
        assert "('finished', 260, 2)" in shown["move"]
