"""Rows of unlike length, and other ones in each epoch: padded in whichever microbatches, on
whichever devices, the curve is that of a plain loop which reads line by line and pads nothing.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import Reader, line
from torch import nn

from rank_runs import train_on_ranks
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.observe import read_events
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm
from tiny import MACHINE
from worlds import JobFailedError, Pool

HERE = Path(__file__).parent
STEPS = 8  # of 10, 10 and 3 lines: almost three epochs
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"batch": {"accumulate": 3}}),
    "columns": (1, {"batch": {"accumulate": 2}, "data": {"columns": True, "prefetch": 0}}),
    "workers": (1, {"batch": {"accumulate": 3}, "data": {"workers": 2}}),
    "dp": (2, {"batch": {"accumulate": 2}, "devices": {"strategy": "dp"}}),
    "ddp": (3, {"devices": {"strategy": "ddp"}}),
    "fsdp": (2, {"batch": {"accumulate": 2}, "devices": {"strategy": "fsdp"}}),
    "exact": (2, {"train": {"exact": True}}),
}


def laid_out(layout: str, task: str = "Ragged", **data: str) -> tuple[Config, Plan]:
    world, how = LAYOUTS[layout]
    values: dict[str, Any] = {
        "task": f"{HERE}/ragged.py:{task}",
        "batch": {"samples": 10, **how.get("batch", {})},
        "data": {**how.get("data", {}), **data},
        "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0, "clip": 0.3},
        "schedule": {"decay": "constant"},
        "train": {
            "steps": STEPS,
            "precision": "f64",
            "eval_every": 4,
            "allow_coupled": task == "Meaned",
            **how.get("train", {}),
        },
        "devices": {"use": f"cpu:{world}", **how.get("devices", {})},
    }
    config = load_document(Document(values), Tasks()).config
    return config, plan(config, MACHINE, open_task(config, "").facts())


def trained(
    pool: Pool,
    home: Path,
    layout: str,
    *,
    task: str = "Ragged",
    resume: int | None = None,
    stop_at: int | None = None,
    **data: str,
) -> list[Event]:
    """The run's journal. resume: from what was saved after this step."""
    config, made = laid_out(layout, task, **data)
    return train_on_ranks(pool, home, config, made, resume=resume, stop_at=stop_at)


def numbers(events: list[Event]) -> list[float]:
    """Losses and gradient norms of the steps, and what was evaluated."""
    steps = [event.values for event in events if event.kind == "step"]
    evaluated = [event.values for event in events if event.kind == "evaluated"]
    return [
        *(value[name] for name in ("loss", "grad_norm") for value in steps),
        *(value[name] for name in ("loss", "accuracy") for value in evaluated),
    ]


def total(model: Reader, indices: list[int], epoch: int) -> tuple[torch.Tensor, int, int]:
    """The loss of these lines, one by one, how many tokens that is, and how many were right."""
    losses, tokens, right = [], 0, 0
    for index in indices:
        one = torch.from_numpy(line(index, epoch))
        logits = model(one[None, :-1])[0]
        losses.append(nn.functional.cross_entropy(logits, one[1:], reduction="sum"))
        tokens += len(one) - 1
        right += int((logits.argmax(-1) == one[1:]).sum())
    return torch.stack(losses).sum(), tokens, right


@pytest.fixture(scope="module")
def by_hand() -> list[float]:
    """What a plain loop gives from a run's initial values, in the order of numbers()."""
    config, made = laid_out("single")
    task = open_task(config, "")
    engine = TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")])
    model: Any = engine.init().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    steps, evaluated = [], []
    for step in range(STEPS):
        ids = made.order.ids(range(step, step + 1))[0].tolist()
        loss, tokens, _ = total(model, ids, step // 3)
        optimizer.zero_grad()
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        steps.append([loss.item() / tokens, norm.item()])
        if step % 4 == 3:
            loss, tokens, right = total(model, list(range(100, 107)), 0)
            evaluated.append([loss.item() / tokens, right / tokens])
    engine.close()
    assert steps[-1][0] < steps[0][0] - 0.1  # it learns
    return [*np.transpose(steps).ravel(), *np.transpose(evaluated).ravel()]


IN_SHORT = {"ddp", "fsdp", "exact", "workers"}


@pytest.mark.parametrize(
    "layout",  # in make test: one of processes, one of shards, one exact, one of another feed
    [
        pytest.param(layout, marks=[pytest.mark.long] * (layout not in IN_SHORT))
        for layout in LAYOUTS
    ],
)
def test_ragged_rows_give_the_curve_of_a_loop_without_padding(
    layout: str, by_hand: list[float], pool: Pool, tmp_path: Path
) -> None:
    events = trained(pool, tmp_path, layout)
    np.testing.assert_allclose(numbers(events), by_hand, rtol=1e-12)


def test_shards_give_it_too(by_hand: list[float], pool: Pool, tmp_path: Path) -> None:
    """Decoded otherwise in each epoch, by workers, in the order that the permutation says."""
    for first in (0, 12):
        rows = (f'{{"index": {index}}}\n' for index in range(first, min(first + 12, 23)))
        (tmp_path / f"lines-{first:02d}.jsonl").write_text("".join(rows))
    shards = str(tmp_path / "lines-*.jsonl")
    events = trained(pool, tmp_path / "run", "workers", shards=shards)
    np.testing.assert_allclose(numbers(events), by_hand, rtol=1e-12)


def test_they_do_so_when_a_run_is_moved_in_the_middle_of_an_epoch(
    by_hand: list[float], pool: Pool, tmp_path: Path
) -> None:
    trained(pool, tmp_path, "ddp", stop_at=4)
    events = trained(pool, tmp_path, "columns", resume=4)
    np.testing.assert_allclose(numbers(events), by_hand, rtol=1e-12)


def test_a_mean_over_a_microbatchs_tokens_is_seen(pool: Pool, tmp_path: Path) -> None:
    """So the tests above can fail: the same two layouts, with that fault."""
    first, second = (
        numbers(trained(pool, tmp_path / layout, layout, task="Meaned"))
        for layout in ("single", "columns")
    )
    assert abs(first[0] - second[0]) > 1e-3


def test_a_loss_that_follows_the_padding_is_refused_before_the_first_step(
    pool: Pool, tmp_path: Path
) -> None:
    """Each part of the split check is padded as a microbatch of its own would be."""
    with pytest.raises(JobFailedError, match="of which 1 and 3 give 6 and 30, together 36"):
        trained(pool, tmp_path, "single", task="Counted")
    assert not numbers(read_events(tmp_path / "journal.jsonl"))
