"""The gallery under examples/: every file is short, and gives one curve on any devices, its random
numbers on.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from samecurve.core.config.document import Document, read_file
from samecurve.core.config.sections import Config, load
from samecurve.experiments.layout_runner import LayoutRunner
from samecurve.experiments.layouts import parse_layout
from samecurve.experiments.verdicts import compare_layouts
from samecurve.tasks import Tasks, open_task
from tiny import MACHINE
from worlds import Pool

ROOT = Path(__file__).parents[1]
NEEDS = {"text_classification": "transformers"}
GALLERY = [
    "denoiser",
    "lstm",
    "resnet",
    "teacher",
    "text_classification",
    "vae",
]
SPLIT_ALL_WAYS = ["ddp:3", "fsdp:2/3", "hsdp:4..dp:2"]
IN_ONE_ROUND = {"resnet": ["ddp:3", "hsdp:4..dp:2"]}  # its statistics are those of all samples


def example(name: str, **train: Any) -> Config:
    """Its config in f64, `train` replaced in part."""
    document: Document = read_file(ROOT / "examples" / f"{name}.yaml")
    document.set("task", f"{ROOT}/{document.value['task']}", "test")
    for key, value in {"precision": "f64", **train}.items():
        document.set(f"train.{key}", value, "test")
    return load(document, Tasks()).config


@pytest.mark.parametrize("name", GALLERY)
def test_each_example_is_short_and_one_curve(name: str, pool: Pool, tmp_path: Path) -> None:
    """On other devices, in accumulation steps, moved from one strategy to another."""
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60
    config = example(name)
    runner = LayoutRunner(
        config,
        MACHINE,
        open_task(config, "").facts(),
        steps=3,
        kind="cpu",
        pool=pool,
        home=tmp_path,
    )
    layouts = [parse_layout(layout) for layout in IN_ONE_ROUND.get(name, SPLIT_ALL_WAYS)]
    verdicts = list(compare_layouts(runner, layouts, 1e-11))
    assert [verdict.verdict for verdict in verdicts] == ["PASS"] * len(layouts), verdicts
