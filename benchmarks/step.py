"""Seconds a step, ours beside a hand-written PyTorch loop on the same model, batches and optimizer, alternating in one process.

The raw loop gathers its batch, clips, and reads its loss once a step, as a careful script does. Prints each side's median, the ratio, and
what ours adds a step; writes benchmarks/results/step-<machine>.json. Run: python -m benchmarks.step
"""

import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

from lockstep.core.config import load
from lockstep.core.document import Document
from lockstep.core.events import Event
from lockstep.core.loop import train
from lockstep.core.plan import Plan, plan
from lockstep.core.protocols import Engine, Task
from lockstep.data.feed import Feed
from lockstep.observe.journal import Journal
from lockstep.observe.pulse import Pulse
from lockstep.on_torch.collectives import Ranks
from lockstep.on_torch.engine import TorchEngine
from lockstep.probe import cpu, probe
from lockstep.tasks import Tasks
from lockstep.tasks.language.fields import LanguageData, LanguageModel
from lockstep.tasks.language.torch_task import TorchLanguage

STEPS, ALTERNATIONS = 100, 5


class NoStore:
    """Nothing is saved in a timing."""

    def save(self, *_: object) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class NoRequests:
    def pending(self) -> list[int]:
        return [0] * 4


def setting(home: Path) -> tuple[TorchLanguage, Plan, torch.device]:
    text = home / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}\n" for i in range(20_000)))
    values = {
        "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_seq_len": 16}, "data": {"source": str(text), "eval_samples": 0}, "batch": {"samples": 4},
        "train": {"steps": STEPS}, "devices": {"strategy": "single"},
    }
    config = load(Document(values), Tasks()).config
    assert isinstance(config.model, LanguageModel)
    assert isinstance(config.data, LanguageData)
    task = TorchLanguage(config.model, config.data, home / "cache")
    made = plan(config, probe(), task.facts())
    torch.set_num_threads(1)
    return task, made, torch.device(made.devices[0].place)


def ours(task: TorchLanguage, made: Plan, device: torch.device, home: Path) -> float:
    """Seconds a step of the whole loop, journal and heartbeat included."""
    config = load(Document({"batch": {"samples": 4}}), Tasks()).config
    return timed(TorchEngine(task, made, config.optimizer, Ranks(), [device]), task, made, home, 20)


def timed(engine: Engine, task: Task, made: Plan, home: Path, warm: int) -> float:
    """Median seconds a step of a run by itself, its first `warm` steps left out."""
    feed = Feed(made, made.held_by(0), task.train_data(), None, engine.stage, prefetch=2)
    journal = Journal(home / f"journal-{time.time_ns()}.jsonl")
    times: list[float] = []

    def record(event: Event) -> None:
        times.append(time.perf_counter())
        journal.record(event)

    train(made, engine, feed, NoStore(), record, Pulse(home / "pulse"), NoRequests(), task.summarize)
    journal.close()
    return statistics.median(b - a for a, b in pairwise(times[warm:-3]))


def raw(task: TorchLanguage, made: Plan, device: torch.device) -> float:
    model = task.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    data, order = task.train_data(), made.order
    gaps = []
    for ids in order.ids(range(STEPS)):
        began = time.perf_counter()
        optimizer.zero_grad()
        moved = {name: torch.from_numpy(array).to(device) for name, array in data[ids].items()}
        loss = F.cross_entropy(model(moved["tokens"]).flatten(0, 1), moved["labels"].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        gaps.append(time.perf_counter() - began)
    return statistics.median(gaps[20:])


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        task, made, device = setting(home)
        sides: dict[str, Callable[[], float]] = {"lockstep": lambda: ours(task, made, device, home), "raw": lambda: raw(task, made, device)}
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(ALTERNATIONS):
            for name, side in sides.items():
                found[name].append(side())
    added = statistics.median(a - b for a, b in zip(found["lockstep"], found["raw"], strict=True))
    ratio = statistics.median(a / b for a, b in zip(found["lockstep"], found["raw"], strict=True))
    name = made.devices[0].name if device.type == "cuda" else cpu.name()
    result = {"machine": name, "python": platform.python_version(), "torch": torch.__version__, "seconds": found, "added_seconds": added, "ratio": ratio}
    for side_name, seconds in found.items():
        print(f"{side_name:<10}{statistics.median(seconds) * 1e6:8.0f} us a step   ({', '.join(f'{s * 1e6:.0f}' for s in seconds)})")
    print(f"ratio     {ratio:8.3f}   lockstep adds {added * 1e6:.0f} us a step")
    place = Path(__file__).parent / "results" / f"step-{re.sub('[^A-Za-z0-9]+', '-', name).strip('-').lower()}.json"
    place.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
