"""The gallery under examples/: every file is short, and gives one curve on any devices, its random
numbers on.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from one_curve import check_one_curve
from samecurve.core.config.document import Document, read_document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.errors import UserError
from samecurve.tasks import Tasks
from worlds import Pool

ROOT = Path(__file__).parents[1]
NEEDS = {"text_classification": "transformers"}
GALLERY = [
    "clip",
    "moe",
    "denoiser",
    "gan",
    "lstm",
    "moco",
    "resnet",
    "tagger",
    "teacher",
    "text_classification",
    "vae",
]
QUICK = ["clip"]  # all of them in make test-long
SPLIT_ALL_WAYS = ["ddp:3", "fsdp:2/3", "hsdp:4..dp:2"]
EVERY_LAYOUT = ["single/3", "dp:2", "ddp:2", "ddp:2/3", "fsdp:2", "hsdp:4", "ddp:2..fsdp:3"]
ONE_ROUND = {"resnet"}  # its statistics are those of all samples
EXACT = ["ddp:2", "dp:3", "ddp:3..single"]
EXACT_SHARDS = ["fsdp:2..hsdp:4..fsdp:3"]
OWN_OPTIMIZER = {"moco"}  # which --exact does not let update shards


def example(name: str, **train: Any) -> Config:
    """Its config in f64, `train` replaced in part."""
    document: Document = read_document(ROOT / "examples" / f"{name}.yaml")
    document.set("task", f"{ROOT}/{document.value['task']}", "test")
    for key, value in {"precision": "f64", **train}.items():
        document.set(f"train.{key}", value, "test")
    return load_document(document, Tasks()).config


def possible(name: str, layouts: list[str]) -> list[str]:
    return [layout for layout in layouts if name not in ONE_ROUND or "/" not in layout]


@pytest.fixture(params=GALLERY)
def name(request: pytest.FixtureRequest) -> str:
    """An example's, whose packages there are."""
    example_name: str = request.param
    needed = NEEDS.get(example_name, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    return example_name


def test_each_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.long
@pytest.mark.parametrize("one", QUICK)
def test_each_example_is_one_curve(one: str, pool: Pool, tmp_path: Path) -> None:
    """On other devices, in accumulation steps, moved from one strategy to another."""
    layouts = possible(one, SPLIT_ALL_WAYS)
    check_one_curve(example(one), layouts, pool, tmp_path, steps=3, near=1e-11)


@pytest.mark.long
def test_each_example_is_one_curve_in_every_layout(name: str, pool: Pool, tmp_path: Path) -> None:
    check_one_curve(
        example(name), possible(name, EVERY_LAYOUT), pool, tmp_path, steps=3, near=1e-11
    )


@pytest.mark.long
def test_each_example_keeps_its_bits(name: str, pool: Pool, tmp_path: Path) -> None:
    """With --exact: one hash of parameters and optimizer state on any devices, and moved."""
    config = example(name, precision="f32", exact=True)
    if name not in ONE_ROUND:
        layouts = EXACT if name in OWN_OPTIMIZER else EXACT + EXACT_SHARDS
        check_one_curve(config, layouts, pool, tmp_path, steps=3, near=0.0)
        return
    with pytest.raises(UserError, match=r"train\.exact: the running statistics of BatchNorm2d"):
        check_one_curve(config, EXACT, pool, tmp_path, steps=3, near=0.0)
