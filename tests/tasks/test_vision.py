"""Task vision: one curve on any devices under either engine, its loss, the lines of its guide."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
import torch

from commands import samecurve
from one_curve import check_one_curve
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.protocols import MicroBatch
from samecurve.data import IGNORED
from samecurve.errors import UserError
from samecurve.jax_engine.sample_numbers import keyed_arrays, with_numbers
from samecurve_products.pictures.vision.jax_task import JaxVision
from samecurve_products.pictures.vision.sections import VisionData, VisionModel
from samecurve_products.pictures.vision.torch_task import TorchVision
from tiny import config_of
from worlds import Pool

ROOT = Path(__file__).parents[2]
GATED = {
    **{"cssm": "gated", "steps": 2, "kernel_size": 3, "norm": "image"},
    **{"dropout": 0.2, "drop_path": 0.3},
}
HGRU = {"cssm": "hgru_bi", "steps": 3, "kernel_size": 3}


def values(model: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """A config's values: digits on 4 x 4 patches; 10 images a step leave short tails."""
    train = {"steps": 6, "precision": "f64", **sections.pop("train", {})}
    return {
        "task": "vision",
        "engine": "jax",
        "model": {"width": 8, "depth": 2, "patch": 2, "label_smoothing": 0.1, **model},
        "data": {"source": "digits", "eval_samples": 20},
        "batch": {"samples": 10},
        "optimizer": {"lr": 1e-2},
        "train": train,
        "devices": {"use": "cpu"},
        **sections,
    }


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (GATED, ["ddp:2..jax:3"]),
        pytest.param(
            GATED,
            [
                "jax:1",
                "jax:2",
                "jax:3",
                "jax:4",
                "jax:8",
                "jax-fsdp:3",
                "jax:2/3",
                "ddp:3",
                "fsdp:2",
            ],
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"cssm": "attention", "heads": 2, "drop_path": 0.3},
            ["jax:2", "ddp:3", "dp:2", "fsdp:2", "jax:3..fsdp:2"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_one_curve_whatever_the_devices_and_the_engine(
    model: Mapping[str, Any], layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """Dropout and stochastic depth among it, whose masks follow the sample. Engine torch on one
    device is what all are compared with.
    """
    config = config_of({**values(model), "engine": "torch"})
    check_one_curve(config, layouts, pool, tmp_path, steps=6, near=1e-10)


@pytest.mark.long
def test_one_curve_of_hgru_bi(pool: Pool, tmp_path: Path) -> None:
    layouts = ["jax:2", "jax:4", "jax:8", "jax:2/3"]
    check_one_curve(config_of(values(HGRU)), layouts, pool, tmp_path, steps=6, near=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("model", [GATED, HGRU], ids=["gated", "hgru_bi"])
def test_the_same_bits_on_any_number_of_devices(
    model: Mapping[str, Any], pool: Pool, tmp_path: Path
) -> None:
    """Weights, losses and norms are equal to the last bit in f32, with --exact."""
    config = config_of(values(model, train={"precision": "f32", "exact": True}))
    layouts = ["jax:1", "jax:2", "jax:4", "jax:8"]
    verdicts = check_one_curve(config, layouts, pool, tmp_path, steps=6, near=0.0)
    assert len({verdict.hash for verdict in verdicts}) == 1


@pytest.mark.long
def test_a_step_has_one_all_reduce_and_gathers_nothing(pool: Pool) -> None:
    """An FFT that XLA's partitioner split would gather the whole batch."""
    config = values({"cssm": "gated"}, devices={"use": "cpu:4"}, batch={"samples": 16})
    collectives = pool.run(1, jobs.programs, config)[0]
    assert collectives["all-reduce"] == 1
    assert sum(collectives.values()) == 1


def mixed_batch(count: int) -> dict[str, Any]:
    random = np.random.default_rng(3)
    return {
        "pixels": random.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8),
        "labels": random.integers(0, 10, count),
        "labels_2": random.integers(0, 10, count),
        "mix": random.random(count),
    }


class Answers(torch.nn.Module):
    """A model that gives the same logits, whatever it sees."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.from_numpy(logits))

    def forward(self, *_: Any) -> torch.Tensor:
        return self.logits


def test_a_mixed_image_counts_for_both_its_labels(cache: Path) -> None:
    """Cross-entropy with the shares of two labels and the smoothed rest, by the definition; rows
    that are left out count nothing. The same under both engines.
    """
    fields = VisionModel(width=8, depth=1, heads=2, patch=2, label_smoothing=0.1)
    batch, logits = mixed_batch(6), np.random.default_rng(4).normal(size=(6, 10))
    target = np.full((6, 10), 0.1 / 10)
    for name, share in (("labels", batch["mix"]), ("labels_2", 1 - batch["mix"])):
        target[np.arange(6), batch[name]] += 0.9 * share
    expected = -(target * (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))).sum(-1)

    of_torch = TorchVision(fields, VisionData(), cache).loss(
        Answers(logits),
        {name: torch.from_numpy(array) for name, array in batch.items()},
    )
    assert float(of_torch.sum.detach()) == pytest.approx(expected.sum(), rel=1e-12)
    assert float(of_torch.weight) == 6
    with jax.enable_x64(True):
        task = JaxVision(fields, VisionData(), cache, engine="jax")
        real = jnp.arange(6) < 4
        rows = task.leave_out({name: jnp.asarray(array) for name, array in batch.items()}, real)
        assert (np.asarray(rows["labels"])[4:] == IGNORED).all()
        of_jax = task.loss(lambda *_: jnp.asarray(logits), rows)
        assert float(of_jax.sum) == pytest.approx(expected[:4].sum(), rel=1e-12)
        assert int(of_jax.weight) == 4


def test_the_metrics_count_answers(cache: Path) -> None:
    """The confusion matrix, and labels among the five likeliest classes."""
    fields = VisionModel(width=8, depth=1, heads=2, patch=2)
    labels, logits = np.arange(6), np.tile(np.arange(10.0), (6, 1))  # class 9 is the likeliest
    batch = {"pixels": np.zeros((6, 8, 8, 1), np.uint8), "labels": labels}
    engines: list[tuple[Any, Any]] = [
        (TorchVision(fields, VisionData(), cache), torch.from_numpy),
        (JaxVision(fields, VisionData(), cache, engine="jax"), jnp.asarray),
    ]
    models: list[Any] = [Answers(logits), lambda *_: jnp.asarray(logits)]
    for (task, array), model in zip(engines, models, strict=True):
        metrics = task.metrics(model, {name: array(batch[name]) for name in batch})
        counts = np.asarray(metrics["confusion"].sum)
        assert counts[:6, 9].tolist() == [1] * 6
        assert counts.sum() == 6
        assert (int(metrics["top5"].sum), int(metrics["top5"].weight)) == (1, 6)  # of label 5


def test_blocks_that_an_engine_lacks_are_refused(tmp_path: Path) -> None:
    line = ["plan", "-f", str(ROOT / "models/cssm.yaml"), "--devices", "cpu:2"]
    done = samecurve(*line, "--engine", "torch", "--cssm", "hgru_bi", cwd=tmp_path, code=None)
    assert done.returncode == 2
    assert "model.cssm hgru_bi has no PyTorch model" in done.stderr
    assert "--engine jax" in done.stderr


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cssm": "no_gate", "steps": 1}, "the kernels of no_gate act between two steps"),
        ({"cssm": "gated", "kernel_size": 3}, "no kernel in one step"),
        ({"cssm": "gated", "heads": 2}, "heads is of cssm attention"),
        ({"cssm": "attention", "steps": 2}, "steps is of cssm no_gate or gated or hgru_bi"),
        ({"width": 10, "heads": 4}, "not a multiple of heads"),
    ],
)
def test_fields_that_do_not_fit_each_other(fields: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VisionModel.model_validate(fields)


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        ({"patch": 3}, {}, "no whole number of patches of 3"),
        ({"patch": 4, "cssm": "gated", "steps": 2}, {}, "does not fit on 2 x 2 patches"),
        ({"patch": 2}, {"mean": [0.5, 0.5], "std": [1.0, 1.0]}, "data.mean has 2 channels"),
        ({"patch": 2}, {"source": "pathfinder", "resolution": 16}, "32 to 128 pixels a side"),
        ({"patch": 2}, {"source": "nowhere.npz"}, "there is nothing at"),
    ],
)
def test_images_that_do_not_fit_the_model(
    model: Mapping[str, Any], data: Mapping[str, Any], says: str, cache: Path
) -> None:
    with pytest.raises(UserError) as caught:
        TorchVision(
            VisionModel.model_validate(model), VisionData.model_validate(data), cache
        ).model()
    assert says in f"{caught.value.cause} {caught.value.remedy}"


@pytest.mark.long
def test_the_guides_line_trains_as_typed(tmp_path: Path) -> None:
    """`python main.py --arch vit --cssm hgru_bi ...`, a batch that four devices do not divide among
    it; and the same run goes on with another number of devices.
    """
    small = ["--set", "data.samples=30", "--set", "model={width: 8, depth: 1, patch: 4, steps: 2}"]
    line = shlex.split(
        "--arch vit --cssm hgru_bi --batch_size 3 --bf16 --checkpoint_dir checkpoints"
    )
    for devices, steps, world in (("cpu:4", 1, 4), ("cpu:3", 2, 3)):
        more = ["--devices", devices, "--set", "model.kernel_size=3", "--stop-after", str(steps)]
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts/main.py"), *line, *small, *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"Running on {world} devices" in done.stdout
    journal = (tmp_path / "checkpoints/journal.jsonl").read_text().splitlines()
    steps_done = [event for event in map(json.loads, journal) if event["kind"] == "step"]
    assert [event["step"] for event in steps_done] == [1, 2, 3]


def numbers(task: Any, rows: Mapping[str, Any]) -> tuple[Any, Any]:
    factors: tuple[Any, Any] = task._factors(rows)
    return factors


def test_what_is_dropped_follows_the_sample(cache: Path) -> None:
    """Rows in another order draw the same numbers; whole blocks are skipped as often as said."""
    fields = VisionModel(width=8, depth=3, heads=2, patch=2, dropout=0.25, drop_path=0.5)
    task = JaxVision(fields, VisionData(), cache, engine="jax")
    ids = np.arange(2000)

    def drawn(ids: Any) -> tuple[Any, Any]:
        rows = MicroBatch(
            {"labels": np.zeros(len(ids), np.int32)},
            keys=RowKeys(seed=0, epoch=0, step=0, ids=ids),
        )
        arrays = {name: jnp.asarray(array) for name, array in keyed_arrays(rows).items()}
        return with_numbers(lambda rows: numbers(task, rows), arrays)

    kept, features = map(np.asarray, drawn(ids))
    again = [np.asarray(array) for array in drawn(ids[::-1])]
    np.testing.assert_array_equal(kept, again[0][::-1])
    np.testing.assert_array_equal(features, again[1][::-1])
    assert (kept[:, 0] == 1).all()
    np.testing.assert_allclose((kept == 0).mean(0), [0, 0.25, 0.5], atol=0.04)
    np.testing.assert_allclose((features == 0).mean(), 0.25, atol=0.02)
    np.testing.assert_allclose(features.mean(), 1, atol=0.02)
