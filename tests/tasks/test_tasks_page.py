"""The pages about tasks: what they quote stands in examples, what they show runs, what they count
is so.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samecurve
from one_curve import check_one_curve
from samecurve.core.config.document import Document, parse_document
from samecurve.core.config.loading import load_document
from samecurve.tasks import Tasks, open_task
from samecurve.tasks.adapter.members import check_signatures
from samecurve.tasks.user_class import place_of
from samecurve.tasks.user_class.load_class import load_class
from worlds import Pool

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/tasks.md", *sorted(ROOT.glob("docs/task-*.md"))]
PAGE = "\n".join(page.read_text() for page in PAGES)
FOUR_WAYS = ROOT / "examples/four_ways"
SIDES = {
    "plain PyTorch": "plain.py",
    "Accelerate": "with_accelerate.py",
    "Lightning": "with_lightning.py",
    "Samecurve": "ours.py",
}
NEEDS = {"Accelerate": "accelerate", "Lightning": "lightning"}


class Block(NamedTuple):
    """A fenced block of Python: the section it stands in, the paragraph before it, its text."""

    heading: str
    before: str
    text: str


def blocks() -> Iterator[Block]:
    heading = ""
    for part in re.split(r"^(?=#+ )", PAGE, flags=re.MULTILINE):
        heading = part.partition("\n")[0].lstrip("# ")
        found = re.finditer(r"```python\n(.*?)```", part, flags=re.DOTALL)
        for match in found:
            paragraphs = part[: match.start()].rstrip().rsplit("\n\n", 1)
            yield Block(heading, paragraphs[-1], match[1])


BLOCKS = list(blocks())
EXCERPTS = [block for block in BLOCKS if block.before.startswith("From [examples/")]


def one_block(heading: str) -> str:
    (block,) = [block for block in BLOCKS if block.heading == heading]
    return block.text


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("block", EXCERPTS, ids=lambda block: block.heading)
def test_what_is_quoted_stands_in_an_example_that_a_test_trains(block: Block) -> None:
    name = re.findall(r"examples/(\w+)\.py", block.before)[0]
    example = lines_of((ROOT / "examples" / f"{name}.py").read_text())
    for piece in re.split(r"^\.\.\.$", block.text, flags=re.MULTILINE):
        quoted = lines_of(piece)
        places = range(len(example) - len(quoted) + 1)
        assert any(example[at : at + len(quoted)] == quoted for at in places), piece
    galleries = [path.read_text() for path in (ROOT / "tests").glob("test_gallery*.py")]
    assert any(f'"{name}"' in gallery for gallery in galleries)


def test_each_kind_is_quoted() -> None:
    assert len(EXCERPTS) >= 9
    for name in ("parts.py", *SIDES.values()):
        assert f"](../examples/four_ways/{name})" in PAGE


def own_lines(text: str) -> int:
    """Without imports and empty ones."""
    return sum(not re.match("(import|from) ", line) for line in lines_of(text))


def test_the_lines_of_each_way_are_counted() -> None:
    rows = re.findall(r"^\| ([A-Za-z ]+?)[\d. ]* \| (\d+) \|", PAGE, flags=re.MULTILINE)
    said = {name: int(count) for name, count in rows}
    assert said == {name: own_lines((FOUR_WAYS / file).read_text()) for name, file in SIDES.items()}


@pytest.fixture
def sides(tmp_path: Path) -> Path:
    """A directory with all of them."""
    for name in ("parts.py", *SIDES.values()):
        shutil.copy(FOUR_WAYS / name, tmp_path)
    return tmp_path


def test_ours_is_one_curve(sides: Path, pool: Pool) -> None:
    values = {"task": f"{sides}/ours.py:Ring", "batch": {"samples": 50}}
    config = load_document(Document(values), Tasks()).config
    check_one_curve(config, ["ddp:3/2"], pool, sides / "runs", steps=2, near=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", SIDES)
def test_each_way_trains(name: str, sides: Path) -> None:
    """To the same accuracy, more or less, and the three that can go on have nothing left to do."""
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    command = [sys.executable, SIDES[name]]
    done = subprocess.run(command, cwd=sides, capture_output=True, text=True, check=True)
    accuracy = max(map(float, re.findall(r"0\.\d{2,}", done.stdout)))
    assert accuracy > 0.6
    if name != "plain PyTorch":
        again = subprocess.run(command, cwd=sides, capture_output=True, text=True, check=True)
        assert len(again.stdout) < len(done.stdout) / 2


def test_an_augmentation_follows_sample_and_epoch() -> None:
    namespace: dict[str, Any] = {"np": np, "samecurve": samecurve}
    exec(one_block("Augmentation"), namespace)
    data = namespace["Flipped"](np.arange(400.0).reshape(40, 1, 10), np.arange(40))
    ids = np.arange(40)
    first, again, later = (data.__getitem__(ids, epoch) for epoch in (0, 0, 1))
    np.testing.assert_array_equal(first["picture"], again["picture"])
    np.testing.assert_array_equal(first["picture"][7:9], data.__getitem__(ids[7:9], 0)["picture"])
    assert 5 < (first["picture"] != later["picture"]).any(axis=(1, 2)).sum() < 35


def test_the_first_task_and_what_may_be_added_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """my_task.py as it stands there, and the file beside it that is shown further below."""
    monkeypatch.delitem(sys.modules, "my_task", raising=False)  # another test's
    (tmp_path / "my_task.py").write_text(one_block("A whole task"))
    path = tmp_path / "radam.py"
    path.write_text(one_block("An optimizer of your own"))
    config = parse_document(re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[0], "ring.yaml")
    config.set("task", f"{path}:Ring", "test")
    facts = open_task(load_document(config, Tasks()).config, "").facts()
    assert facts.updates.user_optimizer is not None
    assert (facts.updates.user_optimizer.name, facts.updates.user_optimizer.scales) == (
        "RAdam",
        (1.0, 0.1),
    )


def test_the_methods_of_phases_are_called_so() -> None:
    namespace: dict[str, Any] = {"torch": torch, "F": F, "Mean": samecurve.Mean}
    exec(one_block("How to write phases"), namespace)
    members = {name: namespace[name] for name in ("phases", "loss", "optimizer")}
    check_signatures(type("MyTask", (), members)(), "MyTask")
    model = nn.ModuleDict({"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})
    model.generator, model.critic = model["generator"], model["critic"]
    for phase in namespace["phases"]:
        loss = namespace["loss"](None, model, {"x": torch.ones(3, 4)}, phase)
        assert loss.sum.requires_grad
        assert loss.weight == 3
        optimizer = namespace["optimizer"](None, list(model.named_parameters()), 1.0, phase)
        assert optimizer.defaults["lr"] == {"critic": 1.0, "generator": 0.25}[phase]


def test_sections_and_entries_are_made_so() -> None:
    namespace: dict[str, Any] = {
        "samecurve": samecurve,
        "KindsModel": samecurve.Section,
        "KindsData": samecurve.DataSection,
    }
    exec(one_block("Config fields of a task"), namespace)
    exec(one_block("Install a task as a package"), namespace)
    assert namespace["MyTask"](namespace["MyTask"].Model(), namespace["MyTask"].Data()).width == 64
    assert set(namespace["ENTRY"].classes) == {"torch", "jax"}


def test_a_script_of_ours_is_run_up_to_its_call(sides: Path) -> None:
    place = place_of(f"{sides}/ours.py:Ring")
    assert place is not None
    assert load_class(place).__name__ == "Ring"
