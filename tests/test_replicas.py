"""train.check_replicas: one bit that one rank or device does not share is found and named, under
every strategy that holds copies; a run without fault is the same to the bit, compared or not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import samecurve
from replica_runs import Flip, train_flipped
from samecurve.core.strategies import STRATEGIES
from samecurve.observe import read_events
from tiny import Outcome, TinyRun, tiny_values
from worlds import Pool

WEIGHT = "layers.0.mlp.down_proj.weight"
FROZEN: Any = {"groups": [{"match": "embed_tokens.*", "freeze": True}]}
EXACT = {"exact": True, "precision": "f32"}
LONG = pytest.mark.long
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
        resume: Path | None = None,
        stop_at: int | None = None,
        **sections: Any,
    ) -> Any:
        strategy, _, count = layout.partition(":")
        engine = "jax" if strategy.startswith("jax-") else "torch"
        strategy = strategy.removeprefix("jax-")
        train = {"steps": 12, "check_replicas": every, **sections.pop("train", {})}
        values = tiny_values(
            corpus, train=train, devices={"use": f"cpu:{count}", "strategy": strategy}, **sections
        )
        per_device = STRATEGIES[engine, strategy].processes == "one per device"
        job = TinyRun(home, {**values, "engine": engine}, cache, resume=resume, stop_at=stop_at)
        results = pool.run(int(count) if per_device else 1, train_flipped, job, flip)
        if isinstance(results[0], str):
            assert set(results) == {results[0]}  # every rank ends with the same words
        return results[0]

    return run


FOUND = [  # layout, fault, after which step it is found, who
    ("ddp:3", Flip(1, 5), 8, "on every rank: rank 1 has other bits than ranks 0 and 2"),
    pytest.param("ddp:2", Flip(1, 8), 8, "on every rank: ranks 0 and 1 differ", marks=LONG),
    pytest.param("hsdp:4", Flip(3, 5), 8, "on every rank: ranks 1 and 3 differ", marks=LONG),
    # dp gives every device the first one's weights after each step: the fault must still be there
    ("dp:3", Flip(2, 5, again=True), 8, "on every device: device 2 has other bits than devices 0"),
    pytest.param("jax-dp:2", Flip(1, 5), 8, "on every device: devices 0 and 1 differ", marks=LONG),
]


@pytest.mark.parametrize(("layout", "flip", "step", "who"), FOUND)
def test_a_flipped_bit_is_found_within_the_interval(
    *, layout: str, flip: Flip, step: int, who: str, train: Train, tmp_path: Path
) -> None:
    text = train(tmp_path, layout, flip)
    assert f"after step {step} {flip.name}" in text
    assert who in text
    alike = [e.step for e in read_events(tmp_path / "journal.jsonl") if "arrays_alike" in e.values]
    assert alike == [at for at in (0, 4) if at < step]
    assert not [*(tmp_path / "checkpoints").glob("step-*")]  # nothing of it was saved


@pytest.mark.parametrize(
    ("layout", "name", "sections"),
    [
        ("ddp:2", f"optimizer/exp_avg/{WEIGHT}", {}),
        ("ddp:2", f"ema/{WEIGHT}", {"train": {"ema": 0.9}}),
        ("ddp:2", "model/embed_tokens.weight", {"optimizer": FROZEN}),
        ("ddp:2", f"model/{WEIGHT}", {"train": EXACT}),
        pytest.param("jax-dp:2", f"model/{WEIGHT}", {"train": EXACT}, marks=LONG),
    ],
)
def test_whatever_is_kept_in_copies_is_compared(
    layout: str, name: str, sections: Any, train: Train, tmp_path: Path
) -> None:
    """The optimizer's state, the average of the weights, what is frozen; and the exact forms."""
    text = train(tmp_path, layout, Flip(1, 4, name), every=4, **sections)
    assert f"after step 4 {name} is not the same" in text


def test_what_differs_is_found_before_it_is_evaluated_or_saved(
    train: Train, tmp_path: Path
) -> None:
    """The comparison that is due at step 100 comes at step 6, where the run is left and saves."""
    text = train(tmp_path, "ddp:2", Flip(1, 5), every=100, stop_at=6, train={"eval_every": 7})
    assert "after step 6 " in text
    events = read_events(tmp_path / "journal.jsonl")
    assert not [event for event in events if event.kind in {"evaluated", "saved"}]


def test_in_fsdp_each_number_is_held_once(train: Train, tmp_path: Path) -> None:
    """So a flipped bit is the run's own, and no comparison can find it."""
    outcome = train(tmp_path, "fsdp:2", Flip(1, 5))
    assert len(outcome.losses) == 12


@pytest.mark.parametrize(
    "layout",
    ["ddp:2", *(pytest.param(layout, marks=LONG) for layout in ("dp:2", "hsdp:4", "jax-dp:2"))],
)
def test_a_run_is_the_same_to_the_bit_whether_it_is_compared_or_not(
    layout: str, train: Train, tmp_path: Path
) -> None:
    """Also with an average, with what is frozen, and over a resume."""
    sections: Any = {"train": {"ema": 0.9}, "optimizer": FROZEN}
    plain: Outcome = train(tmp_path / "plain", layout, every=0, **sections)
    home = tmp_path / "compared"
    train(home, layout, every=1, stop_at=6, **sections)
    saved = home / "checkpoints" / "step-00000006"
    compared: Outcome = train(home, layout, every=1, resume=saved, **sections)
    assert (compared.losses, compared.norms) == (plain.losses, plain.norms)
    for name, array in plain.arrays.items():
        assert array.tobytes() == compared.arrays[name].tobytes(), name


def test_a_plain_run_has_no_part_of_it(train: Train, tmp_path: Path) -> None:
    train(tmp_path, "ddp:2", every=0)
    events = read_events(tmp_path / "journal.jsonl")
    assert not [event for event in events if event.kind == "hashed"]


DRIFT = """
import os
from pathlib import Path

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


class Drift:
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, model, batch):
        error = model(batch["x"]) - batch["y"]
        return Mean(error.square().sum(), len(error))

    def train_data(self):
        return Points()

    def after_step(self, model, step):
        if os.environ["RANK"] == "1" and step == 6 and not Path("flipped").exists():
            Path("flipped").touch()
            model[2].weight.view(torch.int32)[0, 3] ^= 1
"""


def test_a_task_that_changes_weights_on_one_rank_alone(tmp_path: Path) -> None:
    """As it is typed. Another start goes on from the last save, which was compared."""
    (tmp_path / "drift.py").write_text(DRIFT)
    done = samecurve(
        *("train", "--set", "task=drift.py:Drift", "--devices", "cpu:2", "--global-batch", "16"),
        *("--max-steps", "12", "--set", "train.check_replicas=4", "--set", "train.save_every=4"),
        *("--set", "devices.max_restarts=1", "--save-dir", "run"),
        cwd=tmp_path,
    )
    assert "replicas: 2 copies are compared every 4 steps" in done.stdout
    assert "after step 8 model/2.weight is not the same on every rank: ranks 0 and 1" in done.stdout
    assert "done   step 12" in done.stdout
    resumed = [e.step for e in read_events(tmp_path / "run/journal.jsonl") if e.kind == "resumed"]
    assert resumed == [4]
