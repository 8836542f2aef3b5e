"""A planted fault, and the runs in which faults are planted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve import Mean

FILE = Path(__file__)
SOURCES = FILE.parents[2] / "src" / "samecurve"
FROZEN = FILE.parents[1] / "torch_engine" / "frozen.py"
STEPS = 3
Arrays = Mapping[str, torch.Tensor]
Replace = Callable[[Any, str, Any], None]  # an owner, the name of its part, what stands there


class Source:
    """Rows of eight numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, ids: Sequence[int]) -> dict[str, Any]:
        rows = [np.random.default_rng(int(row)).normal(size=8) for row in ids]
        return {"x": np.stack(rows).astype(np.float32)}


class Rows:
    """A small task without a fault."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def loss(self, model: nn.Module, batch: Arrays) -> Mean:
        out = self.changed(model(batch["x"]))
        return Mean((out - batch["x"].sum(1, keepdim=True)).square().sum(), len(out))

    def changed(self, out: torch.Tensor) -> torch.Tensor:
        """The model's output as the loss sees it; a task with a fault has its own."""
        return out

    def train_data(self) -> Source:
        return Source()


def run_of(use: str, strategy: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A config's values: three steps of three microbatches of two rows."""
    values: dict[str, Any] = {
        "task": f"{FILE}:Rows",
        "data": {},
        "batch": {"samples": 6, "per_device": 2},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": STEPS, "precision": "f64", "exact": False, "save_every": 0},
        "devices": {"use": use, "strategy": strategy, "preflight": 0},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    return values


EXACT = {"precision": "f32", "exact": True}
RUNS = {
    "single": run_of("0", "single"),
    "exact single": run_of("0", "single", train=EXACT),
    "dp": run_of("0,1", "dp"),
    "ddp": run_of("0,1", "ddp"),
    "exact ddp": run_of("0,1", "ddp", train=EXACT),
    "offloaded fsdp": run_of("0,1", "fsdp", train={"ema": 0.5}, devices={"offload": True}),
    "frozen weights on the host": {
        **run_of("0", "single", batch={"samples": 10}, devices={"offload_frozen": 1.0}),
        "task": f"{FROZEN}:Adapted",
    },
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault.

    kind: as a rehearsal names it. run: a key of RUNS. file: where it is planted, and where a line
    ends with `# fault: NAME`. plant: replaces parts of the engine; None: the task has the fault.
    task: a class of the file in the place of the run's own task. line: a line of samecurve that
    must be named in the place of the one that is marked. sharp: whether `make test` has it.
    """

    name: str
    kind: str
    run: str
    file: str
    plant: Callable[[Replace], None] | None = None
    task: str = ""
    line: str = ""
    sharp: bool = False

    @property
    def place(self) -> str:
        """The file and the line that a rehearsal must name."""
        name, path, mark = Path(self.file).name, Path(self.file), f"# fault: {self.name}"
        if self.line:
            name, _, mark = self.line.partition(": ")
            path = SOURCES / name
        lines = path.read_text().splitlines()
        [number] = [index for index, line in enumerate(lines, 1) if line.endswith(mark)]
        return f"{name}:{number} "

    @property
    def values(self) -> dict[str, Any]:
        """The config's values of the run."""
        values = RUNS[self.run]
        return {**values, "task": f"{self.file}:{self.task}"} if self.task else values

    @property
    def control(self) -> tuple[str, dict[str, Any]]:
        """The same run without the fault: its name, and the config's values."""
        if self.task and self.plant:
            return f"{self.run}, {self.task}", self.values
        return self.run, RUNS[self.run]


FAULTS: dict[str, Fault] = {}


def planted(kind: str, run: str, **more: Any) -> Callable[[Callable[[Replace], None]], None]:
    """Note a fault under the name of the function that plants it."""

    def note(plant: Callable[[Replace], None]) -> None:
        name, file = plant.__name__, plant.__code__.co_filename
        FAULTS[name] = Fault(name=name, kind=kind, run=run, file=file, plant=plant, **more)

    return note


def loss_of(kind: str, run: str, **more: Any) -> Callable[[type[Rows]], type[Rows]]:
    """Note a task whose loss has a fault, under the name of the class."""

    def note(task: type[Rows]) -> type[Rows]:
        name, file = task.__name__, task.changed.__code__.co_filename
        FAULTS[name] = Fault(name=name, kind=kind, run=run, file=file, task=name, **more)
        return task

    return note


def side_stream() -> Any:
    """A stream beside the current one of the current device, the same for all calls."""
    index = torch.cuda.current_device()
    if index not in _side_streams:
        _side_streams[index] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return _side_streams[index]


_side_streams: dict[int, Any] = {}
