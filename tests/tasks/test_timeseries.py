"""Classifiers of windows: one curve on any devices, metrics that are exact, augmentation that
follows the sample.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from har_sets import CLASSES, LENGTH, write_har
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score
from sklearn.utils.class_weight import compute_class_weight

import samecurve
from one_curve import check_one_curve
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.sample_numbers import serving
from samecurve.errors import InvalidConfigError, UserError
from samecurve.observe import read_events
from samecurve.tasks import open_task
from samecurve.torch_engine.randomness import (
    MicroBatchContext,
    StagedKeys,
    numbers_in_work,
)
from samecurve_products.sensors.augment import drop_channels, jitter, scale, warp_time
from samecurve_products.sensors.sections import TimeSeriesData, TimeSeriesModel
from samecurve_products.sensors.task import TimeSeriesTask
from samecurve_products.task_parts.classification import weigh_classes
from starts import start, train
from tiny import config_of
from worlds import Pool

MODELS: dict[str, dict[str, Any]] = {
    "resnet": {"name": "resnet", "width": 8, "depth": 2, "kernel_size": 3},
    "transformer": {"name": "transformer", "width": 8, "depth": 2, "patch": 4, "heads": 2},
    "mlp": {"name": "mlp", "width": 12, "depth": 2},
}
AUGMENT = {"jitter": 0.1, "scale": 0.2, "time_warp": 0.3}
WEIGHED = {"label_smoothing": 0.1, "class_weights": "balanced", "dropout": 0.2}


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 windows of four people to train on, 9 of one to validate."""
    return write_har(tmp_path_factory.mktemp("har") / "set")


def values(source: Path, model: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    data = {"source": str(source), **sections.pop("data", {})}
    return {
        "task": "timeseries",
        "model": model,
        "data": data,
        "batch": {"samples": 10},
        "optimizer": {"lr": 3e-3},
        "train": {"steps": 6, "precision": "f64", **sections.pop("train", {})},
        "devices": {"use": "cpu", "preflight": 0},
        **sections,
    }


@pytest.mark.parametrize(
    ("model", "data", "layouts"),
    [
        ("resnet", {"augment": {**AUGMENT, "channel_dropout": 0.3}}, ["fsdp:2/4"]),
        ("transformer", {"mode": "flatten", "augment": AUGMENT}, ["dp:2"]),
        *(
            pytest.param(
                model,
                {"mode": mode, "augment": AUGMENT},
                ["single/4", "dp:2/4", "ddp:2", "ddp:3/4", "fsdp:2", "fsdp:3/4", "ddp:2..fsdp:3"],
                marks=pytest.mark.long,
            )
            for model, mode in (
                ("resnet", "joint"),
                ("resnet", "flatten"),
                ("transformer", "joint"),
                ("transformer", "average"),
                ("mlp", "flatten"),
                ("mlp", "first"),
            )
        ),
    ],
)
def test_devices_do_not_change_the_curve(
    *,
    model: str,
    data: dict[str, Any],
    layouts: list[str],
    windows: Path,
    pool: Pool,
    tmp_path: Path,
) -> None:
    """Classes that fall unevenly on microbatches, with weights; dropout; windows that are changed
    in each epoch. An epoch is 36 windows in steps of 10, the last one short.
    """
    config = config_of(values(windows, {**MODELS[model], **WEIGHED}, data=data))
    check_one_curve(config, layouts, pool, tmp_path, steps=5, near=1e-10)


@pytest.mark.long
def test_batch_norm_is_one_curve_where_it_is_synchronised(
    windows: Path, pool: Pool, tmp_path: Path
) -> None:
    model = {**MODELS["resnet"], "norm": "batch"}
    config = config_of(values(windows, model, train={"norm_sync": True}))
    check_one_curve(config, ["ddp:2", "ddp:3", "fsdp:2"], pool, tmp_path, steps=5, near=1e-10)


def test_batch_norm_is_not_split_unasked(windows: Path, cache: Path, tmp_path: Path) -> None:
    model = {**MODELS["resnet"], "norm": "batch"}
    alone = start(tmp_path / "one", values(windows, model), cache)
    assert any("BatchNorm1d stem.1" in reason for reason in alone.plan.reasons.values())
    split = values(windows, model, devices={"use": "cpu:2", "preflight": 0})
    with pytest.raises(UserError, match=r"BatchNorm1d stem\.1") as caught:
        start(tmp_path / "two", split, cache)
    assert "norm_sync" in caught.value.remedy


def evaluated(run: Path) -> dict[str, Any]:
    events = [event for event in read_events(run / "journal.jsonl") if event.kind == "evaluated"]
    return dict(events[-1].values)


@torch.no_grad()
def answers_of(run: Path, source: Path, mode: str) -> tuple[np.ndarray[Any, Any], ...]:
    """Labels, answers window by window, and answers channel by channel, of the saved model."""
    model = samecurve.load(run)
    fields = TimeSeriesData(source=str(source), mode=mode, validation=0.6)  # type: ignore[arg-type]
    rows = TimeSeriesTask(TimeSeriesModel(), fields, run / "cache").eval_data()
    assert rows is not None
    held = rows[np.arange(len(rows))]
    if mode != "flatten":
        answers = [int(model(torch.from_numpy(x[None]))[0].argmax()) for x in held["x"]]
        return held["label"], np.array(answers), np.array(answers)
    chances = [
        [model(torch.from_numpy(x[None, None]))[0].softmax(-1).numpy() for x in window]
        for window in held["x"]
    ]
    each = np.array(chances)
    return held["label"], each.mean(1).argmax(-1), each.argmax(-1)


def check_metrics(
    metrics: Mapping[str, Any], prefix: str, labels: np.ndarray[Any, Any], answers: Any
) -> None:
    answers = np.asarray(answers)
    assert metrics[f"{prefix}accuracy"] == pytest.approx(accuracy_score(labels, answers), abs=1e-15)
    f1 = f1_score(labels, answers, average="macro")
    assert metrics[f"{prefix}macro_f1"] == pytest.approx(f1, abs=1e-15)
    counts = confusion_matrix(labels, answers, labels=range(len(CLASSES)))
    assert metrics[f"{prefix}confusion"] == counts.tolist()


@pytest.mark.parametrize(
    ("mode", "worlds"),
    [("flatten", (1, 3)), pytest.param("joint", (1, 2, 4), marks=pytest.mark.long)],
)
def test_metrics_are_sklearn_s_on_any_number_of_ranks(
    *,
    mode: str,
    worlds: tuple[int, ...],
    windows: Path,
    cache: Path,
    pool: Pool,
    tmp_path: Path,
) -> None:
    """27 windows of three people held out, which no number of ranks here divides evenly; in mode
    flatten a window's answer is that of its channels' mean probabilities.
    """
    shown = []
    for world in worlds:
        config = values(
            windows,
            MODELS["resnet"],
            data={"mode": mode, "validation": 0.6},
            optimizer={"lr": 5e-2},
            devices={"use": f"cpu:{world}", "preflight": 0},
            train={"steps": 30, "eval_every": 30},
        )
        run = tmp_path / str(world)
        train(pool, start(run, config, cache))
        shown.append(evaluated(run))
    labels, whole, each = answers_of(tmp_path / str(worlds[-1]), windows, mode)
    assert len(labels) == 27
    assert len(set(whole.tolist())) > 1
    prefix = "window_" if mode == "flatten" else ""
    check_metrics(shown[-1], prefix, labels, whole)
    if mode == "flatten":
        check_metrics(shown[-1], "", np.repeat(labels, 9), each.reshape(-1))
    shares = zip(np.array_split(labels, 3), np.array_split(whole, 3), strict=True)
    of_ranks = [f1_score(*share, average="macro") for share in shares]
    assert np.mean(of_ranks) != pytest.approx(shown[0][f"{prefix}macro_f1"], abs=1e-3)  # planted
    for metrics in shown[1:]:
        assert metrics["loss"] == pytest.approx(shown[0]["loss"], rel=1e-12)
        for name in metrics.keys() - {"loss", "best_loss", "seconds"}:
            assert metrics[name] == shown[0][name]


def within(rows: list[int], epoch: int = 0, seed: int = 0) -> MicroBatchContext:
    """A microbatch of these samples in work."""
    keys = StagedKeys(RowKeys(seed=seed, epoch=epoch, step=0, ids=np.array(rows)))
    return MicroBatchContext(torch.device("cpu")).within(keys)


def augmented(x: torch.Tensor, rows: list[int], **keys: int) -> torch.Tensor:
    """Of the samples of these numbers."""
    with serving(numbers_in_work), within(rows, **keys):
        numbers = samecurve.rng({"x": x})
        y = warp_time(x[rows], numbers, 0.2)
        y = scale(y, numbers, 0.3)
        y = jitter(y, numbers, 0.1)
        return drop_channels(y, numbers, 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_augmentation_follows_the_sample(dtype: torch.dtype) -> None:
    """The same bits whatever the microbatch; others in another epoch, under another seed, and, as
    a plant, for rows that take the numbers of their place.
    """
    x = torch.randn(11, 9, 21, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = augmented(x, list(range(11)))
    assert whole.dtype == dtype
    for rows in ([0, 1, 2], [10], [7, 3, 5, 9, 4]):
        assert torch.equal(augmented(x, rows), whole[rows])
    for others in (augmented(x, list(range(11)), epoch=1), augmented(x, list(range(11)), seed=1)):
        assert not torch.isclose(others, whole).all(-1).all(-1).any()
    with serving(numbers_in_work), within([0, 1]):
        planted = jitter(x[[3, 4]], samecurve.rng({"x": x}), 0.1)
    with serving(numbers_in_work), within([3, 4]):
        assert not torch.equal(planted, jitter(x[[3, 4]], samecurve.rng({"x": x}), 0.1))


def test_what_augmentation_does() -> None:
    rows = list(range(2000))
    x = torch.linspace(0, 1, 65).repeat(len(rows), 3, 1)
    with serving(numbers_in_work), within(rows):
        numbers = samecurve.rng({"x": x})
        noise = jitter(x, numbers, 0.1) - x
        factors = scale(x, numbers, 0.3)[:, :, -1]
        warped = warp_time(x, numbers, 0.2)
        kept = drop_channels(x, numbers, 0.25)[:, :, -1]
    assert float(noise.std()) == pytest.approx(0.1, rel=0.02)
    assert float(factors.mean()) == pytest.approx(1, abs=0.02)
    assert float(factors.std()) == pytest.approx(0.3, rel=0.05)
    assert float((kept == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(warped[:, :, [0, -1]], x[:, :, [0, -1]])  # its ends stay
    torch.testing.assert_close(warped[:, 0], warped[:, 2])  # channels stay together
    speed = warped[:, 0].diff(dim=-1) * 64
    assert float(speed.std()) == pytest.approx(0.2, rel=0.1)
    assert float((speed >= 0).float().mean()) > 0.999


@torch.no_grad()
def test_the_loss_is_torch_s_own(windows: Path, cache: Path) -> None:
    """CrossEntropyLoss with weights and label smoothing, of the whole batch; a sample of a heavy
    class counts for more in the sum and in what it is divided by.
    """
    model = {
        **MODELS["mlp"],
        "label_smoothing": 0.2,
        "class_weights": {"SITTING": 3, "LAYING": 0.5},
    }
    task = open_task(config_of(values(windows, model)), cache).task
    network = task.model().double().eval()
    rows = task.train_data()[np.arange(20)]
    batch = {name: torch.from_numpy(column) for name, column in rows.items()}
    parts = [
        task.loss(network, {name: column[at] for name, column in batch.items()})
        for at in (slice(0, 3), slice(3, 20))
    ]
    weights = torch.tensor([1, 1, 1, 3, 1, 0.5], dtype=torch.float64)
    reference = torch.nn.CrossEntropyLoss(weights, label_smoothing=0.2)
    ours = sum(part.sum for part in parts) / sum(part.weight for part in parts)
    torch.testing.assert_close(ours, reference(network(batch["x"]), batch["label"]))
    planted = sum(part.sum / part.weight for part in parts) / len(parts)  # a mean of means
    assert not torch.isclose(planted, ours, rtol=1e-4)
    wrong = config_of(values(windows, {**MODELS["mlp"], "class_weights": {"RUNNING": 2}}))
    with pytest.raises(UserError, match="RUNNING is no label of the data"):
        open_task(wrong, cache)


def test_balanced_weights_are_sklearn_s() -> None:
    """Of the classes that there are; one without samples weighs as if nothing were weighed."""
    counts = [3, 0, 5, 12]
    ours = weigh_classes("balanced", list("abcd"), counts)
    labels = np.repeat(range(4), counts)
    theirs = compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=labels)
    assert ours[1] == 1.0
    np.testing.assert_allclose(np.delete(ours, 1), theirs, rtol=1e-15)


@torch.no_grad()
def test_rows_of_single_channels_measure_no_windows(windows: Path, cache: Path) -> None:
    """`eval --on train` in mode flatten: a window's channels are in several rows there."""
    config = config_of(values(windows, MODELS["mlp"], data={"mode": "flatten"}))
    task = open_task(config, cache).task
    network = task.model().double().eval()
    shown = []
    for rows in (task.train_data()[np.arange(12)], task.eval_data()[np.arange(9)]):
        batch = {name: torch.from_numpy(column) for name, column in rows.items()}
        shown.append(task.summarize(task.metrics(network, batch)))
    assert [sum(map(sum, one["confusion"])) for one in shown] == [12, 9 * 9]
    assert not any("window" in name for name in shown[0])
    assert np.sum(shown[1]["window_confusion"]) == 9


@pytest.mark.parametrize("mode", ["joint", "flatten", "average", "first"])
def test_other_data_is_read_as_the_run_reads_its_own(mode: str, windows: Path, cache: Path) -> None:
    """`eval -d DIR/test`: normalised by what was trained on, whole windows, the run's weights."""
    data = TimeSeriesData(source=str(windows), mode=mode)  # type: ignore[arg-type]
    task = TimeSeriesTask(TimeSeriesModel(class_weights="balanced"), data, cache)
    kept = task.assets()["windows.json"].parent
    fields = TimeSeriesTask.other_data(str(windows / "test"), kept, {})
    other_data = data.model_copy(
        update={key.removeprefix("data."): fields[key] for key in fields if key[:5] == "data."}
    )
    model = TimeSeriesModel(class_weights=fields["model.class_weights"])
    other = TimeSeriesTask(model, other_data, cache)
    test = task.test_data()
    assert test is not None
    here, there = (rows[np.arange(18)] for rows in (other.train_data(), test))
    assert len(other.train_data()) == 18
    for name in there:
        np.testing.assert_array_equal(here[name], there[name])
    assert other.format == task.format
    assert (other.eval_data(), other.test_data()) == (None, None)
    short = np.zeros((4, 9, LENGTH - 1))
    np.savez(cache / "short.npz", x=short, label=[0, 1, 0, 1])
    with pytest.raises(UserError, match="9 channels x 15 time steps; the run's are of 9 x 16"):
        TimeSeriesTask(
            model, other_data.model_copy(update={"source": str(cache / "short.npz")}), cache
        ).train_data()


def test_the_facts_are_those_of_the_model(windows: Path, cache: Path) -> None:
    for model in MODELS.values():
        task = open_task(config_of(values(windows, model)), cache)
        facts = task.facts()
        built = task.task.model()
        assert facts.params == sum(p.numel() for p in built.parameters())
        assert facts.blocks >= 2
        assert facts.bytes_per_sample
        assert facts.flops_per_sample
        logits = built(torch.zeros(3, 9, LENGTH))
        assert logits.shape == (3, 6)
    linear = sum(p.numel() for p in built.parameters() if p.ndim == 2)
    assert facts.flops_per_sample == 6 * linear  # of the mlp, by hand


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        ({"name": "mlp", "norm": "batch"}, {}, "norm is of model resnet, and name is mlp"),
        ({"kernel_size": 4}, {}, "kernel_size 4 is even"),
        ({"name": "transformer", "width": 6}, {}, "width 6 is not a multiple of heads 4"),
        ({"name": "transformer", "patch": 5}, {}, "no multiple of model.patch 5"),
        ({}, {"mode": "first", "augment": {"channel_dropout": 0.1}}, "leaves nothing of a sample"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: dict[str, Any], data: dict[str, Any], says: str, windows: Path, cache: Path
) -> None:
    with pytest.raises(UserError, match=says):
        open_task(config_of(values(windows, model, data=data)), cache).model()


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"SITTING": -1}, "class_weights.SITTING: should be greater than 0"),
        ([1, 2], "class_weights: [1, 2] is not one of none, balanced"),
    ],
)
def test_a_value_of_several_forms_has_the_faults_of_its_own(
    weights: Any, says: str, windows: Path
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        config_of(values(windows, {**MODELS["mlp"], "class_weights": weights}))
    assert [says in error.cause for error in caught.value.errors] == [True]
