"""A loss over the whole batch: one curve, that of a plain loop over the whole batch at once, under
every layout; mistakes are told.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from whole_batch import Contrastive, Source

from batch_runs import STEPS, Alone, Curve, batch_config, check_equal, trained, with_layout
from samecurve import Mean
from samecurve.core.config.sections import Config
from samecurve.core.planning.planner import plan
from samecurve.errors import SamecurveError
from samecurve.features.whole_batch import batch_loss_step
from samecurve.features.whole_batch.gathered_features import FeatureTable, Layout
from samecurve.observe import read_events
from samecurve.tasks import open_task
from samecurve.tasks.adapter.torch_adapter import TorchAdapter
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm
from tiny import MACHINE
from worlds import Pool

HERE = Path(__file__).parent
TASKS = ("Contrastive", "SupCon", "VICReg", "Mixture")


def config_of(task: str, **sections: Any) -> Config:
    return batch_config(f"{HERE}/whole_batch.py:{task}", **sections)


@cache
def plain_loop(name: str) -> Curve:
    """One process, the whole batch at once: features, loss, backward, SGD."""
    config = with_layout(config_of(name), "single", 1)
    task = open_task(config, "")
    made = plan(config, MACHINE, task.facts())
    engine = TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")])
    model = engine.init().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=config.optimizer.momentum)
    train, held_out = task.train_data(), task.eval_data()
    assert held_out is not None

    def loss_of(rows: dict[str, Any]) -> Any:
        batch = {key: torch.from_numpy(array) for key, array in rows.items()}
        return task.task.batch_loss(task.task.features(model, batch))

    losses, evaluated = [], []
    for step in range(STEPS):
        mean = loss_of(train[made.order.ids(range(step, step + 1))[0]])
        optimizer.zero_grad()
        (mean.sum / mean.weight).backward()
        for group in optimizer.param_groups:
            group["lr"] = made.lr_at(step)
        optimizer.step()
        losses.append((mean.sum / mean.weight).item())
        if (step + 1) % 3 == 0:
            with torch.no_grad():
                of_batches = [loss_of(held_out[np.arange(a, b)]) for a, b in ((0, 10), (10, 17))]
            total, weight = (sum(map(float, parts)) for parts in zip(*of_batches, strict=True))
            evaluated.append(total / weight)
    weights = {f"model/{key}": value.numpy() for key, value in model.state_dict().items()}
    return Curve(losses, evaluated, weights, [])


LAYOUTS = [  # task, strategy, world, accumulation
    ("Contrastive", "fsdp", 2, 3),
    ("SupCon", "dp", 2, 3),
    ("VICReg", "single", 1, 3),
    ("VICReg", "ddp", 3, 3),
    ("Mixture", "ddp", 2, 1),
]
MORE = [
    (task, strategy, world, accumulate)
    for task in TASKS
    for strategy, world in (
        ("single", 1),
        ("dp", 2),
        ("dp", 3),
        ("ddp", 2),
        ("ddp", 3),
        ("fsdp", 2),
        ("fsdp", 3),
        ("hsdp", 4),
    )
    for accumulate in (1, 3)
    if (task, strategy, world, accumulate) not in LAYOUTS
]


@pytest.mark.parametrize(
    ("task", "strategy", "world", "accumulate"),
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.long) for layout in MORE)],
)
def test_every_layout_is_the_plain_loop_over_the_whole_batch(
    *, task: str, strategy: str, world: int, accumulate: int, pool: Pool, tmp_path: Path
) -> None:
    """Losses, held-out losses over groups of the batch, and weights; uneven, with a tail that
    leaves devices without a sample.
    """
    config = config_of(task, batch={"accumulate": accumulate})
    check_equal(trained(pool, tmp_path, with_layout(config, strategy, world)), plain_loop(task))


class InRanksOrder(FeatureTable):
    """The planted fault: the last device's rows come first."""

    def put_together(self, parts: Any, num_samples: int) -> dict[str, torch.Tensor]:
        whole = super().put_together(parts, num_samples)
        turned = torch.arange(num_samples).roll(num_samples // 2)
        return {name: rows[turned] for name, rows in whole.items()}


def test_rows_in_the_ranks_order_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's gradient then goes to another sample."""
    monkeypatch.setattr(batch_loss_step, "FeatureTable", InRanksOrder)
    faulty = trained(Alone(), tmp_path, with_layout(config_of("Contrastive"), "dp", 2))
    expected = plain_loop("Contrastive")
    assert np.abs(np.subtract(faulty.losses, expected.losses)).max() > 1e-3


def test_exact_is_one_hash(pool: Pool, tmp_path: Path) -> None:
    """Whatever devices computed it, with graphs kept (three devices of three microbatches) and
    without.
    """
    config = config_of(
        "Contrastive",
        model={"dropout": 0.2},
        batch={"per_device": 4, "samples": 10},
        train={"exact": True, "hash_every": 2, "precision": "f32"},
    )
    one, *others = (
        trained(pool, tmp_path / f"{strategy}{world}", with_layout(config, strategy, world))
        for strategy, world in (("single", 1), ("ddp", 2), ("ddp", 3), ("dp", 3), ("fsdp", 2))
    )
    assert len(one.hashes) == 3
    for other in others:
        assert other.hashes == one.hashes
        assert other.losses == one.losses
        assert other.evaluated == one.evaluated


def test_masks_are_the_same_in_both_passes(pool: Pool, tmp_path: Path) -> None:
    """Dropout follows the sample, in the first pass and again in the second; buffers that a
    forward pass moves are moved by the second alone.
    """
    config = config_of("Contrastive", model={"dropout": 0.3})
    one = trained(pool, tmp_path / "one", with_layout(config, "single", 1))
    plain = plain_loop("Contrastive").losses
    assert max(abs(a - b) for a, b in zip(one.losses, plain, strict=True)) > 1e-3
    thrice = config_of("Contrastive", model={"dropout": 0.3}, batch={"accumulate": 3})
    check_equal(trained(pool, tmp_path / "three", with_layout(thrice, "ddp", 2)), one)


def test_half_precision_scales_its_gradient(pool: Pool, tmp_path: Path) -> None:
    """f16: one curve but for rounding, and no gradient is lost to the scale."""
    config = config_of("Contrastive", train={"precision": "f16"}, batch={"accumulate": 3})
    one, two = (
        trained(pool, tmp_path / strategy, with_layout(config, strategy, world))
        for strategy, world in (("single", 1), ("fsdp", 2))
    )
    np.testing.assert_allclose(one.losses, plain_loop("Contrastive").losses, rtol=0.02)
    np.testing.assert_allclose(two.losses, one.losses, rtol=0.02)


def test_a_stopped_run_goes_on_elsewhere(pool: Pool, tmp_path: Path) -> None:
    config = config_of("SupCon", batch={"accumulate": 3})
    home = tmp_path / "run"
    trained(pool, home, with_layout(config, "ddp", 2), stop_at=4)
    last = home / "checkpoints" / "step-00000004"
    again = trained(pool, home, with_layout(config, "fsdp", 2), resume=str(last))
    check_equal(again, plain_loop("SupCon"))


MISTAKES = {
    "Halved": r'features\(\) gives "z" of shape \(\d, 4\) for \d+ samples',
    "NoGradient": r"nothing that batch_loss\(\) looks at has a gradient: features\(\) gives z",
    "NoMean": r"NoMean\.batch_loss\(\) returns Tensor of shape \(\), not a samecurve\.Mean",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_features_are_told(name: str, tmp_path: Path) -> None:
    config = with_layout(config_of(name, batch={"accumulate": 2}), "single", 1)
    with pytest.raises(SamecurveError, match=MISTAKES[name]):
        trained(Alone(), tmp_path, config)


def test_a_loss_over_the_batch_need_not_use_every_parameter(pool: Pool, tmp_path: Path) -> None:
    config = config_of("Unused", batch={"accumulate": 2})
    alone = trained(Alone(), tmp_path / "alone", with_layout(config, "single", 1))
    check_equal(trained(pool, tmp_path / "fsdp", with_layout(config, "fsdp", 2)), alone)
    journal = tmp_path / "fsdp" / "journal.jsonl"
    warned = [one.values["text"] for one in read_events(journal) if one.kind == "warned"]
    assert sum("does not use head.weight, head.bias: they stay" in text for text in warned) == 1


class TwoLosses(Contrastive):
    def loss(self, model: Any, batch: Any) -> Mean:
        del model, batch
        return Mean(torch.zeros(()), 1)


class Helper:
    """features() beside loss() is nobody's business."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(6, 1)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()

    def loss(self, model: Any, batch: Any) -> Mean:
        return Mean(model(self.features(batch["one"])).sum(), len(batch["one"]))

    def train_data(self) -> Source:
        return Source(23)


class OnlyFeatures:
    model, train_data, features = Helper.model, Helper.train_data, Contrastive.features


class OnlyBatchLoss:
    model, train_data, batch_loss = Helper.model, Helper.train_data, Contrastive.batch_loss


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (TwoLosses, "TwoLosses has two losses, loss() and batch_loss()"),
        (OnlyFeatures, "OnlyFeatures has no batch_loss()"),
        (OnlyBatchLoss, "OnlyBatchLoss has no features()"),
        (Helper, ""),
    ],
)
def test_a_class_has_one_loss_and_all_of_it(task: type, words: str) -> None:
    config = config_of("Contrastive")
    file = Path(__file__)
    if not words:
        assert "whole_batch" not in TorchAdapter(task, config, "", file=file).facts().features
        return
    with pytest.raises(SamecurveError, match=re.escape(words)):
        TorchAdapter(task, config, "", file=file).facts()


def test_rows_of_unlike_shape_are_told() -> None:
    one, two = torch.zeros(2, 3), torch.zeros(2, 4)
    layout = Layout.of({"z": one})
    assert layout.unpack(layout.pack({"z": one}))["z"].shape == (2, 3)
    with pytest.raises(SamecurveError, match=r'"z" with rows of float32 \(4,\) for one microbatch'):
        layout.pack({"z": two})


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_rows_keep_their_bits(dtype: torch.dtype) -> None:
    """Whatever their type: -0.0 and nan too."""
    values = torch.tensor([[-0.0, 1.5, float("nan")], [2.0, -3.0, 0.0]]).to(dtype)
    features = {"a": values, "b": torch.arange(2), "c": torch.zeros(2, 0)}
    layout = Layout.of(features)
    table = torch.zeros(2, layout.width, dtype=torch.uint8)
    packed = layout.pack(features)
    table[:, : packed.shape[1]] = packed
    found = layout.unpack(table)
    assert found["a"].dtype == dtype
    assert found["a"].view(torch.uint8).tolist() == values.view(torch.uint8).tolist()
    assert found["b"].tolist() == [0, 1]
    assert found["c"].shape == (2, 0)
