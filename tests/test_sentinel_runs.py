"""train.sentinel: a bit of one gradient that one rank or device computes wrong is found, named and
judged, under every strategy; a run without fault is the same to the bit, checked or not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import samecurve
from samecurve.core.strategies import STRATEGIES
from samecurve.errors import FAULTY_DEVICE, START_AGAIN
from samecurve.features.guard import choose
from samecurve.observe import read_events
from sentinel_runs import NAME, Flip, train_with_flip
from tiny import Outcome, TinyRun, tiny_values
from worlds import Pool

LONG = pytest.mark.long
EXACT: Any = {"train": {"exact": True, "precision": "f32"}}
BF16: Any = {"train": {"precision": "bf16", "ema": 0.9}}
MORE: list[tuple[str, Any]] = [  # layouts, and sections of the config
    ("ddp:3", EXACT),
    ("fsdp:3", EXACT),
    ("dp:2", {"batch": {"per_device": 2}}),
    ("ddp:2", {}),
    ("ddp:2", BF16),
    ("fsdp:3", BF16),
    ("hsdp:4", {"batch": {"per_device": 2}}),
    ("single:1", EXACT),
    ("dp:3", EXACT),
    ("hsdp:4", EXACT),
    ("jax-single:1", {"batch": {"per_device": 3}}),
    ("jax-dp:2", {"batch": {"per_device": 2}}),
    ("jax-fsdp:3", {"batch": {"per_device": 2}}),
    ("jax-dp:3", EXACT),
    ("jax-fsdp:3", EXACT),
]
WRONG: list[tuple[str, str, Any]] = [  # layouts, who is named, sections of the config
    ("ddp:2", "ranks 0 and 1 differ, each with the same bits each time", {}),
    ("hsdp:4", "rank 1 computed it 2 times, each time with other bits than ranks", {}),
    ("ddp:3", "rank 1 computed it 2 times, each time with other bits", EXACT),
    ("fsdp:3", "rank 1 computed it 2 times, each time with other bits", EXACT),
    ("dp:3", "device 1 computed it 2 times, each time with other bits", EXACT),
    ("jax-dp:3", "device 1 computed it 2 times, each time with other bits than", {}),
    ("jax-fsdp:3", "device 1 computed it 2 times, each time with other bits", {}),
    ("jax-dp:3", "device 1 computed it 2 times, each time with other bits", EXACT),
    ("jax-fsdp:3", "device 1 computed it 2 times, each time with other bits", EXACT),
]
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def train(pool: Pool, corpus: Path, cache: Path) -> Train:
    """Trains 12 steps of the tiny run in a directory; what the first rank gives.

    layout: strategy:devices, or jax-strategy:devices
    """

    def run(
        home: Path,
        layout: str,
        flip: Flip | None = None,
        *,
        every: int = 4,
        on_sentinel: str = "stop",
        **sections: Any,
    ) -> Any:
        strategy, _, count = layout.partition(":")
        engine = "jax" if strategy.startswith("jax-") else "torch"
        strategy = strategy.removeprefix("jax-")
        rule = {"sentinel": every, "on_sentinel": on_sentinel}
        train = {"steps": 12, **rule, **sections.pop("train", {})}
        devices = {"use": f"cpu:{count}", "strategy": strategy}
        values = tiny_values(corpus, train=train, devices=devices, **sections)
        per_device = STRATEGIES[engine, strategy].processes == "one per device"
        job = TinyRun(home, {**values, "engine": engine}, cache)
        results = pool.run(int(count) if per_device else 1, train_with_flip, job, flip)
        if isinstance(results[0], tuple):
            assert set(results) == {results[0]}  # every rank ends with the same words
        return results[0]

    return run


def checked_steps(home: Path) -> list[int]:
    events = read_events(home / "journal.jsonl")
    return [event.step for event in events if "gradients_alike" in event.values]


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        ("single:1", {"batch": {"per_device": 3}}),
        ("ddp:3", {"batch": {"per_device": 2}}),
        pytest.param("fsdp:2", {"batch": {"per_device": 2}}, marks=LONG),
        *(pytest.param(*case, marks=LONG) for case in MORE),
    ],
)
def test_a_run_is_the_same_to_the_bit_whether_it_is_checked_or_not(
    layout: str, sections: Any, train: Train, tmp_path: Path
) -> None:
    """Batches of 10 in ragged microbatches: some devices idle, or compute a dummy."""
    plain: Outcome = train(tmp_path / "plain", layout, every=0, **sections)
    checked: Outcome = train(tmp_path / "checked", layout, every=3, **sections)
    assert (checked.losses, checked.norms) == (plain.losses, plain.norms)
    for name, array in plain.arrays.items():
        assert array.tobytes() == checked.arrays[name].tobytes(), name
    assert checked_steps(tmp_path / "checked") == [1, 3, 6, 9, 12]
    assert not checked_steps(tmp_path / "plain")
    warned = [e for e in read_events(tmp_path / "checked" / "journal.jsonl") if e.kind == "warned"]
    assert not warned


@pytest.mark.parametrize(
    ("layout", "who", "sections"),
    [
        ("ddp:3", "rank 1 computed it 2 times, each time with other bits than ranks 0 and 2", {}),
        ("fsdp:3", "rank 1 computed it 2 times, each time with other bits than ranks 0 and 2", {}),
        (
            "dp:3",
            "device 1 computed it 2 times, each time with other bits than devices 0 and 2",
            {},
        ),
        *(pytest.param(*case, marks=LONG) for case in WRONG),
    ],
)
def test_a_device_that_computes_wrong_is_found_within_the_interval(
    layout: str, who: str, sections: Any, train: Train, tmp_path: Path
) -> None:
    """From step 6 on; the next check is that of step 8, whatever device has the microbatch.

    Step 7 is the first of an epoch, which engine torch probes: by a microbatch computed again where
    the run is exact.
    """
    text, code = train(tmp_path, layout, Flip(1, 5), **sections)
    is_probed = sections is EXACT and not layout.startswith("jax")
    assert f"train.sentinel: in step {7 if is_probed else 8} microbatch " in text
    assert f"the gradient of {NAME} differs: lasting: " in text
    assert who in text.replace(
        "3 times", "2 times"
    )  # the step's own, too, if it has the microbatch
    assert code == FAULTY_DEVICE
    assert checked_steps(tmp_path) == [1, 4]
    assert not [*(tmp_path / "checkpoints").glob("step-*")]


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        ("ddp:3", {}),
        ("single:1", {}),
        pytest.param("fsdp:2", {}, marks=LONG),
        pytest.param("fsdp:2", EXACT, marks=LONG),
        pytest.param("ddp:3", EXACT, marks=LONG),
        pytest.param("dp:2", {}, marks=LONG),
        pytest.param("jax-dp:2", {}, marks=LONG),
        pytest.param("jax-single:1", {}, marks=LONG),
    ],
)
def test_a_single_event_is_told_from_a_device_that_is_faulty(
    layout: str, sections: Any, train: Train, tmp_path: Path
) -> None:
    """It hits the computation beside the step, where nothing else is tried (step 12)."""
    text, code = train(tmp_path, layout, Flip(0, 11, time=0), **sections)
    assert f"the gradient of {NAME} differs: transient: " in text
    assert code == START_AGAIN


def test_a_bit_of_the_gradient_that_the_step_trains_with_is_found(
    train: Train, tmp_path: Path
) -> None:
    """One microbatch a rank: the second backward pass of a rank in a step is the step's own."""
    plan = train(tmp_path / "plain", "ddp:3").plan
    owner = choose(plan, 10, 3).device
    text, code = train(tmp_path / "hit", "ddp:3", Flip(owner, 10, time=1), every=11)
    assert f"transient: rank {owner} computed it " in text
    assert code == START_AGAIN


def test_a_kernel_without_a_fixed_order_is_not_blamed_on_a_device(
    train: Train, tmp_path: Path
) -> None:
    """It gives other bits each time, on every rank, and is found in the first step."""
    text, code = train(tmp_path, "ddp:2", Flip(-1, 0, bit="another"))
    assert "in step 1 " in text
    assert "differs: not deterministic: ranks 0 and 1 computed it" in text
    assert "no device is suspect" in text
    assert code == 1


def test_a_warning_lets_the_run_go_on(train: Train, tmp_path: Path) -> None:
    outcome = train(tmp_path, "ddp:2", Flip(1, 5, time=0), on_sentinel="warn", every=1)
    assert len(outcome.losses) == 12
    warned = [e for e in read_events(tmp_path / "journal.jsonl") if "sentinel" in e.values]
    assert [event.step for event in warned] == [6]
    assert warned[0].values["sentinel"]["devices"] == [1]
    assert warned[0].values["sentinel"]["arrays"] == [NAME]
    assert checked_steps(tmp_path) == [step for step in range(1, 13) if step != 6]


FAULTY = """
import os

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Points:
    def __len__(self):
        return 100

    def __getitem__(self, ids):
        x = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)[ids]
        return {"x": x, "y": x.sum(1, keepdims=True)}


class Faulty:
    step = 0

    def model(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        if os.environ.get("RANK") == "1":
            model[2].weight.register_hook(self.break_bit)
        return model

    def break_bit(self, gradient):
        if self.step >= 7:
            gradient = gradient.clone()
            gradient.view(-1).view(torch.int32)[3] ^= 1
        return gradient

    def loss(self, model, batch):
        error = model(batch["x"]) - batch["y"]
        return Mean(error.square().sum(), len(error))

    def train_data(self):
        return Points()

    def after_step(self, model, step):
        self.step = step + 1
"""


@pytest.mark.long
@pytest.mark.parametrize(("policy", "code"), [("stop", FAULTY_DEVICE), ("warn", 0)])
def test_as_it_is_typed(policy: str, code: int, tmp_path: Path) -> None:
    """The worked example of docs/guarantees.md. A faulty device is not started again."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    done = samecurve(
        *("train", "--set", "task=faulty.py:Faulty", "--devices", "cpu:3", "--global-batch", "16"),
        *("--max-steps", "20", "--set", "train.sentinel=5", "--max-restarts", "2"),
        *("--set", f"train.on_sentinel={policy}", "--save-dir", "run"),
        cwd=tmp_path,
        code=code,
    )
    said = done.stdout + done.stderr
    assert "is computed again on each of 3 devices every 5 steps" in said
    assert "in step 10 microbatch 2 of 3 (samples " in said
    assert "and the gradient of 2.weight differs: lasting: rank 1 computed it 3 times" in said
    assert "again  " not in done.stdout
    report = samecurve("report", "run", cwd=tmp_path)
    assert report.returncode == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "the gradient of 2.weight differs: lasting" in page
