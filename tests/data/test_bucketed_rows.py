"""Rows of unlike shape in buckets: one curve on any devices, whatever the batch leaves over; files
that ranks make before, and samples that they share.
"""

import json
from pathlib import Path
from textwrap import dedent

import pytest
from PIL import Image

from commands import samecurve
from one_curve import check_one_curve
from samecurve.core.config.sections import Config
from samecurve.errors import UserError
from samecurve.observe import read_events
from samecurve.tasks import open_task
from tiny import config_of
from worlds import Pool

TASK = '''
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Squares:
    """Squares of three sizes, 7, 1 and 12 of them; a square's numbers follow from its id."""

    def __init__(self, home, sizes):
        self.home, self.bucket_sizes = Path(home), sizes

    def __len__(self):
        return sum(self.bucket_sizes)

    def __getitem__(self, ids):
        bounds = np.cumsum(self.bucket_sizes)
        (side,) = {4 * (1 + int(np.searchsorted(bounds, i, "right"))) for i in ids}
        factor = float((self.home / "factor").read_text())
        x = np.stack([np.random.default_rng(int(i)).normal(size=(1, side, side)) for i in ids])
        return {"x": (factor * x).astype(np.float32)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)])

    def forward(self, x):
        return self.layers[1](nn.functional.dropout(self.layers[0](x).relu(), 0.1, self.training))


class Bucketed:
    def __init__(self, model, data):
        self.home = data["home"]

    def model(self):
        return Net()

    def loss(self, model, batch):
        noise = torch.randn_like(batch["x"])
        error = (model(batch["x"] + noise) - noise).square().flatten(1).mean(1)
        return Mean(error.sum(), len(error))

    def train_data(self):
        return Squares(self.home, (7, 1, 12))

    def eval_data(self):
        return Squares(self.home, (3, 5))

    def fingerprint(self):
        return "squares"

    def prepare(self, device, part):
        """The second file is the last part's: the others wait for it."""
        here = Path(self.home)
        name = "factor" if part.number == part.of - 1 else f"part-{part.number}"
        yield 0, 1
        (here / f"{name}.new").write_text("0.5")
        os.replace(here / f"{name}.new", here / name)
        while not (here / "factor").exists():
            yield 0, 1
        yield 1, 1

    def sample(self, model, seed, part, step):
        shade = model(torch.zeros(1, 1, 4, 4, dtype=next(model.parameters()).dtype)).mean()
        own = range(part.number, 3, part.of)
        return [np.full((2, 2), number + (seed - step), np.uint8) for number in own]
'''


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "bucketed.py").write_text(dedent(TASK))
    return tmp_path


def config(home: Path, file: str = "bucketed", /, **train: object) -> Config:
    return config_of(
        {
            "task": f"{home}/{file}.py:Bucketed",
            "data": {"home": str(home)},
            "batch": {"samples": 5},
            "optimizer": {"lr": 1e-2},
            "train": {"precision": "f64", "eval_every": 3, "sample_every": 6, **train},
            "devices": {"use": "cpu"},
        }
    )


def test_devices_do_not_change_the_curve_over_buckets(home: Path, pool: Pool) -> None:
    """Steps of 5, 2, 1, 5, 5 and 2 samples, over two epochs."""
    layouts = ["ddp:3", "fsdp:2", "dp:2"]
    check_one_curve(config(home, steps=12), layouts, pool, home, steps=12, near=1e-12)


@pytest.mark.long
def test_exact_bits_over_buckets(home: Path, pool: Pool) -> None:
    here = config(home, steps=7, exact=True, precision="f32")
    check_one_curve(here, ["ddp:2", "ddp:3"], pool, home, steps=7, near=0.0)


def test_facts_name_the_buckets_and_wrong_ones_are_refused(home: Path) -> None:
    here = config(home, steps=2)
    assert open_task(here, str(home)).facts().data.buckets == {"train": (7, 1, 12), "eval": (3, 5)}
    wrong = (home / "bucketed.py").read_text().replace("return sum(self.bucket_sizes)", "return 9")
    (home / "wrong.py").write_text(wrong)
    with pytest.raises(UserError, match="has bucket_sizes 7, 1, 12, for 9 samples"):
        open_task(config(home, "wrong", steps=2), str(home)).facts()


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_share_files_and_samples(home: Path, world: int) -> None:
    """A run of the command: prepared by all ranks, its samples in their order on any world."""
    values = {
        "task": f"{home}/bucketed.py:Bucketed",
        "data": {"home": str(home)},
        "batch": {"samples": 5},
        "train": {"steps": 6, "eval_every": 6, "sample_every": 6, "seed": 9},
        "devices": {"use": f"cpu:{world}"},
    }
    (home / "config.json").write_text(json.dumps(values))
    samecurve("train", "-f", home / "config.json", "--save-dir", "run", cwd=home)
    events = read_events(home / "run" / "journal.jsonl")
    (sampled,) = [event for event in events if event.kind == "sampled"]
    files = [home / "run" / name for name in sampled.values["pictures"]]
    assert [Image.open(file).getpixel((0, 0)) for file in files] == [9, 10, 11]
    assert events[-1].kind == "finished"
