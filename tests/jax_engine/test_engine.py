"""What the jax engine must get right beyond one loss curve: collectives, compilations, complex
weights, half precision, refusals.
"""

import json
import sys
from pathlib import Path
from typing import Any

import flaxes
import jobs
import numpy as np
import pytest

from commands import free_port, refused
from one_curve import check_one_curve
from samecurve.core.config.document import read_document
from samecurve.core.planning.planner import plan as make_plan
from samecurve.core.system.installation import install_command
from samecurve.errors import UserError
from samecurve.launch.pool import JobFailedError
from samecurve.observe import read_events
from samecurve.tasks import open_task
from starts import start, train
from tiny import MACHINE, tiny_values
from worlds import Pool

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


def small(
    kind: str = "",
    devices: str = "cpu:2",
    task: str = "Small",
    strategy: str = "auto",
    **sections: Any,
) -> dict[str, Any]:
    values = {
        "task": f"{HERE}/flaxes.py:{task}",
        "engine": "jax",
        "model": {"kind": kind},
        "data": {},
        "batch": {"samples": 10},
        "optimizer": {"lr": 1e-2},
        **sections,
    }
    values["train"] = {"steps": 12, "precision": "f64", **sections.get("train", {})}
    return {**values, "devices": {"use": devices, "strategy": strategy}}


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_step_has_one_all_reduce_and_an_fft_model_no_all_gather(
    accumulate: int, pool: Pool, corpus: Path
) -> None:
    """Whatever the rounds; and fsdp gathers each parameter once."""
    rounds: Any = {"batch": {"samples": 16, "accumulate": accumulate}}
    fft = pool.run(1, jobs.programs, small(devices="cpu:4", **rounds))[0]
    assert fft == {
        "all-reduce": 1,
        "all-gather": 0,
        "reduce-scatter": 0,
        "all-to-all": 0,
        "collective-permute": 0,
    }
    text = {**tiny_values(corpus, devices={"use": "cpu:4"}, **rounds), "engine": "jax"}
    assert pool.run(1, jobs.programs, text)[0]["all-reduce"] == 1
    cut = pool.run(1, jobs.programs, small(devices="cpu:4", strategy="fsdp", **rounds))[0]
    assert cut["all-gather"] == cut["reduce-scatter"] == 7  # its parameters


def test_nothing_is_compiled_after_the_second_step(pool: Pool) -> None:
    """64 samples in tens: two epochs end with 4, which make one round of the two; learning rates
    come and go.
    """
    found = pool.run(
        1,
        jobs.compilations,
        small(
            devices="cpu:4",
            batch={"samples": 10, "accumulate": 2},
            schedule={"warmup": 5},
            train={"steps": 16},
        ),
    )[0]
    assert len(found) == 16
    assert found[0] > 0
    assert not any(found[2:])


def test_rounds_of_an_evaluation_are_not_queued_ahead(pool: Pool, corpus: Path) -> None:
    """Two CPU devices with many rounds in their queues waited for each other for ever."""
    values = tiny_values(corpus, batch={"samples": 2}, devices={"use": "cpu:2"})
    done = pool.run(1, jobs.evaluation, {**values, "engine": "jax"})[0]
    assert len(done) > 3
    assert all(done)


@pytest.mark.long
def test_complex_weights_are_one_curve(pool: Pool, tmp_path: Path) -> None:
    """examples/fft_jax.py, shared out with accumulation, then held whole."""
    document = read_document(EXAMPLES / "fft_jax.yaml")
    for key, value in (("train.precision", "f64"), ("task", f"{EXAMPLES}/fft_jax.py:Spectral")):
        document.set(key, value, "test")
    config = jobs.config_of(document.value)
    check_one_curve(config, ["jax-fsdp:3/4..jax:2"], pool, tmp_path, steps=5, near=1e-11)


@pytest.mark.long
def test_odd_parameters_layers_and_variables_are_one_curve_too(pool: Pool, tmp_path: Path) -> None:
    """Empty, scalar and short parameters, a recurrent layer, a transform in the forward pass,
    constants: saved, resumed, evaluated.
    """
    config = jobs.config_of(small("odd"))
    check_one_curve(config, ["jax-fsdp:8"], pool, tmp_path, steps=3, near=1e-11)


def test_a_negative_weight_in_mid_run_makes_no_update(pool: Pool, tmp_path: Path) -> None:
    """It would turn the update round; the engine alone sees it, on its devices."""
    prepared = start(tmp_path / "run", small(task="Turned"), tmp_path)
    with pytest.raises(JobFailedError, match=r"step 4: the weights of its loss add up to -5"):
        train(pool, prepared)
    steps = [event for event in read_events(tmp_path / "run/journal.jsonl") if event.kind == "step"]
    assert [event.step for event in steps] == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize(("exact", "layout"), [(False, "jax-fsdp:2/2"), (True, "jax:3")])
def test_numbers_that_a_loss_asks_for_follow_the_sample(
    layout: str, pool: Pool, tmp_path: Path, *, exact: bool
) -> None:
    config = jobs.config_of(small(task="Noisy", train={"exact": exact}))
    near = 0.0 if exact else 1e-12
    check_one_curve(config, [layout], pool, tmp_path, steps=3, near=near)


@pytest.mark.parametrize(
    ("exact", "layout"),
    [
        (False, "jax-fsdp:3/4"),
        pytest.param(True, "jax:3..jax-fsdp:2..jax:2", marks=pytest.mark.long),
    ],
)
def test_dropout_layers_are_one_curve(
    layout: str, pool: Pool, tmp_path: Path, *, exact: bool
) -> None:
    config = jobs.config_of(small("dropout", train={"exact": exact}))
    check_one_curve(config, [layout], pool, tmp_path, steps=3, near=0.0 if exact else 1e-12)


def test_dropout_follows_rows_however_they_are_computed(pool: Pool) -> None:
    """Row by row, whole, and computed again in backward; another curve than without it."""
    losses, metrics, *_ = pool.run(1, jobs.trained, small("dropout"))[0]
    assert losses != pool.run(1, jobs.trained, small())[0][0]
    for other in (small("dropout", task="Whole"), small("dropout", train={"recompute": "block"})):
        again = pool.run(1, jobs.trained, other)[0]
        np.testing.assert_allclose(again[0], losses, rtol=1e-13)
        assert again[1] == pytest.approx(metrics, rel=1e-12)


def test_gradients_of_complex_numbers_as_pairs(pool: Pool) -> None:
    """By pairs they are the slopes along x and y; jax.grad's own is the conjugate; sums over
    devices know complex leaves.
    """
    found = pool.run(1, jobs.conjugates, small(devices="cpu:2"))[0]
    np.testing.assert_allclose(
        found["pairs"], np.stack([found["x"], found["y"]], axis=-1), rtol=1e-8
    )
    np.testing.assert_allclose(found["raw"], found["x"] - 1j * found["y"], rtol=1e-8)
    assert found["sum"].tolist() == [4 - 2j]
    assert found["real"].tolist() == [11.0]


@pytest.mark.long
def test_recompute_changes_nothing_and_half_precision_learns(pool: Pool) -> None:
    plain, metrics, *_ = pool.run(1, jobs.trained, small())[0]
    assert metrics["accuracy"] > 0.4
    for how in ("block", "selective"):
        np.testing.assert_allclose(
            pool.run(1, jobs.trained, small(train={"recompute": how}))[0][0], plain, rtol=1e-13
        )
    wide = pool.run(1, jobs.trained, small(train={"precision": "f32"}))[0][0]
    for precision in ("bf16", "f16"):
        losses, _, arrays, _ = pool.run(1, jobs.trained, small(train={"precision": precision}))[0]
        assert losses != wide
        np.testing.assert_allclose(losses, wide, rtol=2e-2)
        assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
        assert ("loop/scale" in arrays) == (precision == "f16")


def test_a_task_that_leaves_rows_out_by_itself_gives_the_same(pool: Pool) -> None:
    """Short last batches on three devices, where rows fill up what is compiled."""
    by_row, whole = (
        pool.run(1, jobs.trained, small(devices="cpu:3", task=task))[0]
        for task in ("Small", "Whole")
    )
    np.testing.assert_allclose(whole[0], by_row[0], rtol=1e-13)
    assert whole[1] == pytest.approx(by_row[1], rel=1e-13)


def test_a_batch_smaller_than_the_devices_is_served_and_said(pool: Pool) -> None:
    """Three samples on eight devices, and a model trained by sgd."""
    one, eight = (
        pool.run(
            1,
            jobs.trained,
            small(devices=devices, batch={"samples": 3}, optimizer={"name": "sgd", "lr": 0.1}),
        )[0]
        for devices in ("cpu:1", "cpu:8")
    )
    np.testing.assert_allclose(eight[0], one[0], rtol=1e-12)
    assert any("5 of 8 devices have nothing to do" in warning for warning in eight[3])


@pytest.mark.parametrize(
    ("values", "says", "remedy"),
    [
        (small("batchnorm"), "BatchNorm norm mixes the samples", "nnx.GroupNorm"),
        (
            small(task="Brings"),
            "Brings.optimizer(): engine jax trains with the config's adamw and sgd only",
            "--engine torch",
        ),
        (
            small(optimizer={"groups": [{"match": "hed.*", "freeze": True}]}),
            "'hed.*' matches none of the 7 parameters",
            "head.bias",
        ),
        (small("dropped stack"), "Dropout stack.drop stands for the layers of a stack", "nnx.List"),
        (small("dropped in a loop"), "Dropout layers.0.drop is called in a loop", "unroll it"),
        (small("counts"), "parameter count holds int32", "float32"),
        (
            small("noise"),
            "the loss depends on random numbers of",
            "samecurve.rng(batch)",
        ),
        (small("spectral"), "the forward pass changes spectral.", "no running statistics"),
        (small("dotted"), "two parameters are called parts.a.b", "keys without dots"),
        (
            small("raises"),
            "Small.loss(): ZeroDivisionError: what the user's own code does",
            "this line of your code raises the error: correct it there",
        ),
        (
            small("large", train={"precision": "f32"}),
            'data "y" has int64 numbers beyond 32 bits',
            "--dtype f64",
        ),
        (small("mean"), "not a samecurve.Mean", "Mean(sum, weight)"),
        (small("no sum"), "not one real number", "Mean(sum, weight)"),
        (
            small(task="Plain", train={"precision": "bf16"}),
            "can't be told to compute in bf16",
            "def model(self, dtype)",
        ),
        ({**small(task="Plain"), "engine": "torch"}, "not a torch.nn.Module", "--engine jax"),
        (
            {**small(), "engine": "torch"},
            "asks for dtype and rngs, as flax models do",
            "--engine jax",
        ),
        (
            {
                **small(),
                "task": f"{EXAMPLES}/fft.py:Spectral",
                "model": {"width": 4, "depth": 2},
                "data": {"samples": 8},
            },
            "not a flax.nnx.Module",
            "--engine torch",
        ),
    ],
)
def test_what_a_task_of_ones_own_gets_wrong_is_said(
    values: dict[str, Any], says: str, remedy: str, pool: Pool
) -> None:
    cause, what_to_do = pool.run(1, jobs.failure, values)[0]
    assert says in cause
    assert remedy in what_to_do


def test_a_linen_module_is_refused_and_trains_as_the_remedy_wraps_it(pool: Pool) -> None:
    cause, remedy = pool.run(1, jobs.failure, small(task="Linen"))[0]
    assert cause == "Linen.model() returns Dense of flax.linen, not a flax.nnx.Module"
    assert "return nnx.bridge.ToNNX(Dense(...), rngs=rngs).lazy_init(rows)" in remedy
    assert pool.run(1, jobs.failure, small(task="Bridged"))[0] == ("", "")


@pytest.mark.parametrize(
    ("name", "devices", "exact"),
    [
        ("adamw", "cpu:2", False),
        pytest.param("sgd", "cpu:1", False, marks=pytest.mark.long),
        pytest.param("sgd", "cpu:2", True, marks=pytest.mark.long),
    ],
)
def test_what_the_loss_does_not_use_stays_as_it_is(
    name: str, devices: str, *, exact: bool, pool: Pool
) -> None:
    """Its weights and their state, with a large decay; and the note goes into the checkpoint."""
    values = small(
        "unused",
        devices=devices,
        strategy="fsdp" if name == "adamw" else "auto",
        optimizer={"name": name, "lr": 1e-2, "weight_decay": 0.5},
        train={"steps": 3, "exact": exact},
    )
    notes, first, last = pool.run(1, jobs.before_and_after, values)[0]
    assert len(notes) == 1
    assert "the loss does not use spare.bias, spare.kernel: they stay as they are" in notes[0]
    spare = [name for name in last if "spare" in name]
    assert {"loop/late/spare.kernel", "model/spare.kernel"} <= set(spare)
    for array in spare:
        np.testing.assert_array_equal(last[array], first.get(array, 0))
    assert (last["model/head.kernel"] != first["model/head.kernel"]).all()


@pytest.mark.long  # make test compiles other programs, in which no bit differs
def test_arrays_as_short_as_the_devices_have_the_same_bits_under_exact_fsdp(pool: Pool) -> None:
    """head.bias has two numbers, and XLA computes a single number in another way than two."""
    train = {"precision": "f32", "recompute": "block", "exact": True}
    layouts = (("cpu:1", "single"), ("cpu:2", "fsdp"))
    one, two = (
        pool.run(1, jobs.trained, small("dropout", devices, "Whole", strategy, train=train))[0]
        for devices, strategy in layouts
    )
    assert one[0] == two[0]
    for name, array in one[2].items():
        np.testing.assert_array_equal(two[2][name], array, err_msg=name)


def test_without_jax_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.json").write_text(json.dumps(small()))
    for name in ("jax", "flax", "optax"):
        monkeypatch.setitem(sys.modules, name, None)
    said = refused(monkeypatch, capsys, "train", "-f", "small.json", cwd=tmp_path)
    assert "engine jax needs jax, flax, optax: not installed" in said
    assert install_command("jax") in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.long)])
def test_a_rank_that_never_comes_ends_the_preflight(
    engine: str, corpus: Path, tmp_path: Path
) -> None:
    """The collective hangs for good; the limit ends the process that waits, which leaves a note."""
    values = {**tiny_values(corpus, devices={"use": "cpu:2"}), "engine": engine}
    own = Pool(2)
    try:
        with pytest.raises(JobFailedError, match="rank 0 of 2 ended"):
            own.run(2, jobs.silent, values, str(tmp_path / "run"), f"127.0.0.1:{free_port()}")
    finally:
        own.close()
    word = json.loads((tmp_path / "run" / "logs" / "failure-0.json").read_text())
    assert "a first collective over 2 devices did not end within 2 s" in word["cause"]
    assert "--no-preflight" in word["remedy"]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["f64", "f32"])
def test_complex_weights_on_one_to_eight_devices(precision: str, pool: Pool) -> None:
    """50 AdamW steps with clipping, 64 samples in tens (a tail of 4), held whole and shared out,
    one round and four.
    """

    def run(world: int, strategy: str, accumulate: int) -> list[float]:
        sections: dict[str, Any] = {
            "train": {"precision": precision, "steps": 50},
            "batch": {"samples": 10, "accumulate": accumulate},
            "optimizer": {"lr": 3e-3, "clip": 0.5},
        }
        losses: list[float] = pool.run(
            1, jobs.trained, small(devices=f"cpu:{world}", strategy=strategy, **sections)
        )[0][0]
        return losses

    one = run(1, "single", 1)
    for world in (1, 2, 4, 8):
        for strategy in ("dp", "fsdp"):
            for accumulate in (1, 4):
                np.testing.assert_allclose(
                    run(world, strategy, accumulate),
                    one,
                    rtol=1e-10 if precision == "f64" else 2e-6,
                    err_msg=f"{strategy}:{world}/{accumulate}",
                )


def test_a_loss_may_follow_the_step_and_give_more_means(pool: Pool) -> None:
    """As written out in numpy: annealed, clipped by torch's formula, on one device and on several,
    with rounds, exact.
    """
    fields = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0, "clip": 0.4}
    how: dict[str, Any] = {
        "optimizer": fields,
        "schedule": {"decay": "constant"},
        "task": "Annealed",
    }
    made = make_plan(
        jobs.config_of(small(devices="cpu:1", **how)),
        MACHINE,
        open_task(jobs.config_of(small(devices="cpu:1", **how)), "").facts(),
    )
    slope, velocity, expected = np.linspace(-1.0, 1.0, 8), np.zeros(8), []
    for step, ids in enumerate(made.order.ids(range(12))):
        rows = flaxes.Source()[ids]
        x, y = rows["x"].astype(np.float64), rows["y"]
        out = x @ slope
        share = min(1.0, step / 6) * 0.5 ** (step // 7)  # 64 samples in tens
        gradient = ((out - y) + share * out) @ x * 2 / len(x)
        norm = float(np.linalg.norm(gradient))
        loss, penalty = np.mean((out - y) ** 2 + share * out**2), np.mean(out**2)
        expected.append([loss, norm, penalty, out[out > 0].mean()])
        velocity = 0.9 * velocity + gradient * min(1.0, 0.4 / (norm + 1e-6))
        slope = slope - 0.1 * velocity
    layouts: list[tuple[str, dict[str, Any]]] = [
        ("cpu:1", {"batch": {"samples": 10, "accumulate": 3}}),
        ("cpu:4", {}),
        ("cpu:2", {"train": {"exact": True}}),
    ]
    for devices, sections in layouts:
        numbers = pool.run(1, jobs.stepped, small(devices=devices, **how, **sections))[0]
        found = [
            [of_step[name] for name in ("loss", "norm", "penalty", "above")] for of_step in numbers
        ]
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("Followed", "Followed.after_step(): engine jax changes weights by its own update only"),
        ("Phased", "Phased.phases: engine jax has one loss and one optimizer a step"),
        ("Scheduled", "Scheduled.schedule(optimizer) makes a torch scheduler"),
    ],
)
def test_what_only_torch_does_is_refused_by_name(task: str, says: str) -> None:
    config = jobs.config_of(small(devices="cpu:1", task=task))
    with pytest.raises(UserError) as refused:
        open_task(config, "").facts()
    assert says in str(refused.value)
    assert "--engine torch" in str(refused.value) or "schedule(self, step)" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("", ""),
        ("host numbers", "the loss draws numbers of random while it is compiled"),
        ("counted", "the loss is another program each time jax traces it"),
    ],
)
def test_a_loss_that_does_not_repeat_is_refused_before_the_first_step(
    kind: str, says: str, pool: Pool
) -> None:
    said = pool.run(1, jobs.split_check, small(kind, devices="cpu:1"))[0]
    assert said.startswith(f"task: {says}" if says else says)
    assert bool(said) == bool(says)


def test_rows_that_a_task_takes_at_once_add_up(pool: Pool) -> None:
    """Those that are mapped one by one can't see each other."""

    def said(task: str, kind: str = "") -> str:
        texts: list[str] = pool.run(1, jobs.split_check, small(kind, devices="cpu:2", task=task))
        return texts[0]

    assert said("Whole") == ""
    assert said("Coupled").startswith("task: the loss gives the sum")
    assert said("Coupled", "metric").startswith('task: the metric "accuracy" gives weight')
    assert said("Coupled", "idle").startswith("task: loss.sum is nan where a device has no row")
