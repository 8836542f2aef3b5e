"""What the split check costs before a run's first step.

Measured: models/tiny.yaml on one CPU device with one thread, with its batch at once and in four
microbatches: the check's seconds over the median step of the same run, the median over several
runs. Planned: models/large.yaml (1.2B parameters) on eight H100, where a step's computing is
predicted (samecurve plan --machine): the check takes as much of it as the samples that it sends
forward are of those that the step does, a backward pass being two forward ones. How many samples it
sends forward is counted in the measured runs. Run: python -m benchmarks.split_check [--runs 5]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks.common import timed, write
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import LoadedConfig, load_document
from samecurve.core.planning.planner import plan
from samecurve.data.feed import samples_tried
from samecurve.probe import probe
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm
from samecurve_products.lab.other_machine import PredictionRequest, predict
from samecurve_products.text.language.torch_task import Decoder

MODELS = Path(__file__).parents[1] / "models"
STEPS, WARM, MACHINE = 16, 4, "8xH100"


def loaded(name: str, **changes: dict[str, Any]) -> LoadedConfig:
    document = read_document(MODELS / name)
    for section, values in changes.items():
        document.value[section] = {**document.value.get(section, {}), **values}
    return load_document(document, Tasks())


def measured(accumulate: int, home: Path) -> tuple[float, float, float]:
    """Seconds of the check and of a step, and samples sent forward over samples tried."""
    config = loaded(
        "tiny.yaml",
        batch={"accumulate": accumulate},
        train={"steps": STEPS, "save_every": 0, "eval_every": 0, "exact": False},
        data={"validation": 0.0, "eval_samples": 0},
        devices={"use": "cpu", "threads": 1},
    ).config
    task: Any = open_task(config, str(home / "cache"))
    made = plan(config, probe(), task.facts())
    engine = TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")])
    seconds: list[float] = []
    samples: list[int] = []
    check = engine.begin_training

    def timed_check(*arguments: Any, **options: Any) -> Any:
        counting = register_module_forward_pre_hook(count)
        began = time.perf_counter()
        try:
            return check(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - began)
            counting.remove()

    def count(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, Decoder):
            samples.append(len(inputs[0]))

    engine.begin_training = timed_check  # type: ignore[method-assign]
    step = timed(engine, task, made, home / "run", WARM)
    assert samples
    return seconds[0], step, sum(samples) / samples_tried(made.batch.micro_batch_size)


def planned(passes: float) -> dict[str, float]:
    """Of models/large.yaml. passes: how often each sample tried goes forward."""
    prediction = predict(loaded("large.yaml"), PredictionRequest(machine=MACHINE))
    row = next(row for row in prediction.rows if row.plan and row.cost and row.fits)
    assert row.plan
    assert row.cost
    tried = samples_tried(row.plan.batch.micro_batch_size)
    of_a_device = row.plan.batch.global_batch_size / row.plan.layout.num_devices
    seconds = row.cost.compute * passes * tried / (3 * of_a_device)
    return {"seconds": seconds, "step": row.cost.seconds, "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine planned": MACHINE}
    passes = 0.0
    for accumulate in (1, 4):
        with tempfile.TemporaryDirectory() as home:
            rows = [measured(accumulate, Path(home, str(run))) for run in range(runs)]
        check, step = (statistics.median(row[index] for row in rows) for index in (0, 1))
        ratio = statistics.median(row[0] / row[1] for row in rows)
        passes = rows[0][2]
        result[f"accumulate {accumulate}"] = {"check": check, "step": step, "ratio": ratio}
        print(
            f"models/tiny.yaml, {accumulate} microbatches: check {check:.3f} s, step {step:.3f} s,"
            f" {ratio:.2f} of it; each sample tried goes forward {passes:g} times"
        )
    result["passes"], result["planned"] = passes, planned(passes)
    large = result["planned"]
    print(
        f"models/large.yaml on {MACHINE}, planned: check {large['seconds']:.2f} s, step"
        f" {large['step']:.2f} s"
    )
    print(write("split-check", result))


if __name__ == "__main__":
    main()
