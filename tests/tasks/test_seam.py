"""What a built-in task can do, a user's file and an installed package can do too."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file

import samecurve
from samecurve import TaskEntry
from samecurve.cli.main import cli
from samecurve.core.config.document import Document, read_document
from samecurve.core.config.json_schema import as_table
from samecurve.core.config.loading import load_document
from samecurve.core.entry_points import installed as installed_entries
from samecurve.errors import InvalidConfigError, UserError
from samecurve.launch.evaluate_run import evaluate
from samecurve.observe import read_events
from samecurve.run.export_weights import export
from samecurve.run.sample_run import Prompt, sample
from samecurve.run.weights.initial_weights import read_initial_weights
from samecurve.tasks import Tasks, entry_of
from samecurve.tasks.protocol import MEMBERS
from starts import start, train
from worlds import Pool

DOCS = Path(__file__).parents[2] / "docs"
GB = 1 << 30
FILE = """
import numpy as np
import torch
from torch import nn

import samecurve
from samecurve import Mean


class Rows(list):
    def __getitem__(self, ids):
        x = np.stack([np.random.default_rng(i).standard_normal(3) for i in np.take(self, ids)])
        return {"x": x, "kind": np.asarray(ids) % 3}


class Kinds:
    class Model(samecurve.Section):
        width: int = 4

    class Data(samecurve.DataSection):
        samples: int = 23

    @staticmethod
    def data_stamp(data):
        return ["made", data.samples]

    def __init__(self, model, data):
        self.width, self.samples = model.width, data.samples

    def model(self):
        return nn.Sequential(nn.Linear(3, self.width), nn.Tanh(), nn.Linear(self.width, 3))

    def loss(self, model, batch):
        logits = model(batch["x"].to(next(model.parameters()).dtype))
        total = nn.functional.cross_entropy(logits, batch["kind"], reduction="sum")
        return Mean(total, len(logits))

    def metrics(self, model, batch):
        guess = model(batch["x"].to(next(model.parameters()).dtype)).argmax(-1)
        pairs = nn.functional.one_hot(3 * batch["kind"] + guess, 9).sum(0).reshape(3, 3)
        correct = (guess == batch["kind"]).sum()
        return {"accuracy": Mean(correct, len(guess)), "pairs": Mean(pairs, 1)}

    def train_data(self):
        return Rows(range(self.samples))

    def eval_data(self):
        return Rows(range(100, 117))

    def sample(self, model, seed):
        return [f"seed {seed}", np.full((2, 5, 3), 7, np.uint8)]

    def export(self, model, directory):
        (directory / "kinds.txt").write_text("a b c")
        return ["kinds are written"]


class Speaks(Kinds):
    def respond(self, model, prompt, *, tokens, temperature, seed):
        return f"{prompt}{'!' * tokens}"


class Foreign(Kinds):
    def export_hf(self, tensors, directory, dtype):
        (directory / "config.json").write_text("{}")
        return {f"theirs.{name}": tensor for name, tensor in tensors.items()}, [f"in {dtype}"]

    def load_hf(self, names):
        return {name: name.removeprefix("theirs.") for name in names}


class Elsewhere(Kinds):
    class Data(samecurve.DataSection):
        source: str = "few"
        samples: int = 23

    @staticmethod
    def other_data(source, assets, reference):
        return {"data.source": source, "data.samples": {"many": 40, "few": 23}[source]}
"""

FLAX_FILE = """
import jax
import numpy as np
from flax import nnx

import samecurve


class Rows:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        return {"x": np.stack([np.random.default_rng(i).standard_normal(3) for i in ids])}


class Kinds:
    class Model(samecurve.Section):
        width: int = 4

    class Data(samecurve.DataSection):
        samples: int = 23

    def __init__(self, model, data):
        self.width, self.samples = model.width, data.samples

    def model(self, rngs):
        first, second = nnx.Linear(3, self.width, rngs=rngs), nnx.Linear(self.width, 3, rngs=rngs)
        return nnx.Sequential(first, nnx.tanh, second)

    def loss(self, model, batch):
        return samecurve.Mean(((model(batch["x"]) - batch["x"]) ** 2).sum(), len(batch["x"]))

    def train_data(self):
        return Rows(self.samples)
"""

Write = Callable[..., dict[str, Any]]


@pytest.fixture
def values(tmp_path: Path) -> Write:
    def made(name: str = "Kinds", text: str = FILE, **sections: Any) -> dict[str, Any]:
        (tmp_path / "kinds.py").write_text(text)
        return {
            "task": f"{tmp_path}/kinds.py:{name}",
            "batch": {"samples": 5},
            "train": {"steps": 2, "precision": "f64", "eval_every": 2, "sample_every": 2},
            "devices": {"use": "cpu:1"},
            **sections,
        }

    return made


def test_every_member_is_on_the_page() -> None:
    page = (DOCS / "task-members.md").read_text()
    assert [name for name in MEMBERS if f"`{name}" not in page] == []


def test_declared_sections_are_checked_with_their_place(tmp_path: Path, values: Write) -> None:
    values()
    file = tmp_path / "kinds.yaml"
    file.write_text(f"task: {tmp_path}/kinds.py:Kinds\nmodel:\n  widht: 8\nbatch: {{samples: 5}}\n")
    with pytest.raises(InvalidConfigError) as caught:
        load_document(read_document(file), Tasks())
    assert f"{file}:3" in str(caught.value)
    assert "did you mean width?" in str(caught.value)
    with pytest.raises(InvalidConfigError, match="valid integer"):
        load_document(Document(values(model={"width": "wide"})), Tasks())
    config = load_document(Document(values(name="Speaks", data={"samples": 9})), Tasks()).config
    assert (config.model.model_dump(), entry_of(config.task).facts(config, "").data.samples) == (
        {"width": 4},
        9,
    )
    assert "`model.width` | whole number | `4`" in as_table(Tasks(only=str(config.task)))


def test_declared_sections_reach_a_flax_model(tmp_path: Path, values: Write) -> None:
    document = values(text=FLAX_FILE, engine="jax", model={"width": 5}, data={"samples": 9})
    config = load_document(Document(document), Tasks()).config
    described = entry_of(config.task).facts(config, tmp_path)
    assert (described.data.samples, described.params) == (9, 3 * 5 + 5 + 5 * 3 + 3)
    with pytest.raises(InvalidConfigError, match="did you mean width"):
        load_document(Document({**document, "model": {"widht": 5}}), Tasks())


def test_facts_are_kept_by_the_users_stamp_and_file(values: Write) -> None:
    sections: list[dict[str, Any]] = [{}, {}, {"data": {"samples": 9}}, {"text": FILE + "\n"}]
    stamps = []
    for section in sections:
        config = load_document(Document(values(**section)), Tasks()).config
        stamps.append(entry_of(config.task).data_stamp(config))
    assert stamps[0] == stamps[1]
    assert stamps[0] not in stamps[2:]


def test_another_thing_called_model_is_no_section(values: Write) -> None:
    nested = FILE.replace("class Model(samecurve.Section):", "class Model(nn.Module):")
    nested = nested.replace("model.width", "model['width']")
    config = load_document(Document(values(text=nested, model={"width": 4})), Tasks()).config
    assert entry_of(config.task).facts(config, "").params == 31
    bare = FILE.replace("class Model(samecurve.Section):", "class Model:")
    with pytest.raises(UserError, match=r"Kinds.Model is no samecurve.Section"):
        load_document(Document(values(text=bare)), Tasks())


def test_a_file_that_declares_nothing_is_not_run_for_its_config(values: Write) -> None:
    free = FILE[: FILE.index("class Kinds")] + "1 / 0\n\nclass Kinds: ...\n"
    assert load_document(Document(values(text=free, model={"any": 3})), Tasks()).config.task


def test_counts_are_equal_on_any_devices(pool: Pool, values: Write, tmp_path: Path) -> None:
    pairs = []
    for world in (1, 2, 3):
        home = tmp_path / f"run-{world}"
        train(pool, start(home, values(devices={"use": f"cpu:{world}"}), tmp_path))
        (event,) = [
            event for event in read_events(home / "journal.jsonl") if event.kind == "evaluated"
        ]
        pairs.append(event.values["pairs"])
        assert np.trace(pairs[-1]) / 17 == pytest.approx(event.values["accuracy"], rel=1e-12)
    assert pairs[0] == pairs[1] == pairs[2]
    assert np.sum(pairs[0]) == 17


def test_a_users_model_is_sampled_and_exported(pool: Pool, values: Write, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(pool, start(run, values(), tmp_path))
    (event,) = [event for event in read_events(run / "journal.jsonl") if event.kind == "sampled"]
    assert event.values["texts"][0].startswith("seed")
    drawn = sample(run, Prompt(seed=3), "cpu")
    assert drawn.texts == ["seed 3"]
    (file,) = drawn.pictures
    with Image.open(file) as picture:
        assert (np.asarray(picture) == np.full((2, 5, 3), 7)).all()
    with pytest.raises(UserError, match=r"no respond\(\)[\s\S]*write respond\(self, model, prompt"):
        sample(run, Prompt(text="the "), "cpu")
    exported = export(run, tmp_path / "out", "safetensors", None, GB)
    assert exported.notes == ["kinds are written"]
    assert (tmp_path / "out/kinds.txt").read_text() == "a b c"
    assert load_file(tmp_path / "out/model.safetensors")["0.weight"].shape == (4, 3)


def test_an_evaluation_that_is_not_finite_says_so_once(
    pool: Pool, values: Write, tmp_path: Path
) -> None:
    spoilt = FILE.replace(
        "return Mean(total, len(logits))",
        "return Mean(total if model.training else total * np.nan, len(logits))",
    )
    every = {"steps": 3, "precision": "f64", "eval_every": 1}
    train(pool, start(tmp_path / "run", values(text=spoilt, train=every), tmp_path))
    events = read_events(tmp_path / "run/journal.jsonl")
    assert [event.values["loss"] for event in events if event.kind == "evaluated"] == [None] * 3
    (text,) = [event.values["text"] for event in events if event.kind == "warned"]
    assert "evaluation at step 1 gives no finite loss" in text
    assert "--on train" in text


def test_a_prompt_is_answered_by_respond(pool: Pool, values: Write, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(pool, start(run, values(name="Speaks"), tmp_path))
    arguments = ["sample", str(run), "--prompt", "hi", "--tokens", "3", "--device", "cpu"]
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, result.stdout) == (0, "hi!!!\n")


def test_foreign_names_pass_both_ways(pool: Pool, values: Write, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    document = values(name="Foreign")
    train(pool, start(run, document, tmp_path))
    exported = export(run, out, "huggingface", None, GB)
    assert exported.notes == ["in float64", "kinds are written"]
    foreign = load_file(out / "model.safetensors")
    assert all(name.startswith("theirs.") for name in foreign)
    assert (out / "config.json").is_file()
    config = load_document(Document(document), Tasks()).config
    source = read_initial_weights(out, config, entry_of(config.task).facts(config, tmp_path))
    assert source.arrays.keys() == samecurve.load(run).state_dict().keys()
    for name, array in source.arrays.items():
        np.testing.assert_array_equal(array.read(), foreign[f"theirs.{name}"].numpy())


def test_eval_reads_another_source_as_the_class_says(
    pool: Pool, values: Write, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(pool, start(run, values(name="Elsewhere"), tmp_path))
    assert evaluate(run, {}, "many", "held-out", print).samples == 40


def test_without_hooks_the_refusal_names_the_method(
    pool: Pool, values: Write, tmp_path: Path
) -> None:
    mute = FILE.replace("def sample(", "def other(")
    train(pool, start(tmp_path / "run", values(text=mute), tmp_path))
    with pytest.raises(UserError, match=r"sample\(self, model, seed\["):
        sample(tmp_path / "run", Prompt(), "cpu")


ENTRIES = """
from samecurve import DataSection, Section, TaskEntry


class Model(Section):
    width: int = 4


class Data(DataSection):
    samples: int = 23


classes = {"torch": "kinds_package:Kinds"}
ENTRY = TaskEntry(classes=classes, model=Model, data=Data)
BARE = TaskEntry(classes=classes)
SHARED = TaskEntry(classes=classes, engine_free="kinds_shared:Shared", model=Model, data=Data)
TOLD = TaskEntry(classes=classes, engine_free="kinds_shared:Told", model=Model, data=Data)
WRONG = 3
"""

SHARED = """
class Rows:
    def __len__(self):
        return 23

    def __getitem__(self, ids):
        return {"x": ids * 1.0}


class Shared:
    @staticmethod
    def data_stamp(data):
        return ["made", data.samples]

    def train_data(self):
        return Rows()

    def facts(self):
        return {"tokens_per_sample": 3}


class Told(Shared):
    def facts(self):
        return {"arrays": {"0.weight": (4, 3)}}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with tasks, as pip would leave it."""
    files = {"kinds_package": FILE, "kinds_entry": ENTRIES, "kinds_shared": SHARED}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    info = tmp_path / "kinds-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kinds\nVersion: 1.0\n")
    points = {
        "kinds": "ENTRY",
        "bare": "BARE",
        "shared": "SHARED",
        "told": "TOLD",
        "wrong": "WRONG",
    }
    lines = [f"{task} = kinds_entry:{entry}" for task, entry in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[samecurve.tasks]", *lines]))
    monkeypatch.syspath_prepend(str(tmp_path))
    installed_entries.cache_clear()
    yield tmp_path
    installed_entries.cache_clear()
    for name in files:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("package")
def test_an_installed_package_brings_a_task() -> None:
    assert "kinds" in Tasks().names()
    document = {"task": "kinds", "batch": {"samples": 5}, "data": {"samples": 11}}
    config = load_document(Document({**document, "model": {"width": 2}}), Tasks()).config
    assert "kinds_package" not in sys.modules  # its class is imported when it is needed
    assert isinstance(entry_of("kinds"), TaskEntry)
    with pytest.raises(InvalidConfigError, match="did you mean width"):
        load_document(Document({**document, "model": {"widt": 2}}), Tasks())
    with pytest.raises(UserError, match=r"installed package kinds: .* is int"):
        load_document(Document({**document, "task": "wrong"}), Tasks())
    with pytest.raises(UserError, match=r"this task has no class for engine jax"):
        entry_of("kinds").facts(config.model_copy(update={"engine": "jax"}), "")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("task", ["kinds", "bare", "shared"])
def test_an_installed_task_is_described_by_its_engine_where_no_arrays_are_told(
    task: str, tmp_path: Path
) -> None:
    """An entry needs its classes only; an engine-free part need not tell `arrays`."""
    document = {"task": task, "batch": {"samples": 5}, "model": {"width": 2}}
    config = load_document(Document({**document, "data": {"samples": 11}}), Tasks()).config
    facts = entry_of(task).facts(config, tmp_path)
    assert (facts.data.samples, facts.params) == (11, 3 * 2 + 2 + 2 * 3 + 3)
    assert entry_of(task).open(config, tmp_path).facts() == facts
    with pytest.raises(InvalidConfigError, match="did you mean width"):
        load_document(Document({**document, "model": {"widt": 2}}), Tasks())


@pytest.mark.usefixtures("package")
def test_an_installed_task_that_tells_its_arrays_needs_no_engine(tmp_path: Path) -> None:
    config = load_document(Document({"task": "told", "batch": {"samples": 5}}), Tasks()).config
    facts = entry_of("told").facts(config, tmp_path)
    assert (facts.data.samples, facts.params) == (23, 12)
    assert "kinds_package" not in sys.modules


def test_facts_of_an_installed_task_are_kept_by_its_stamp_and_code(package: Path) -> None:
    stamps = []
    for samples, addition in ((9, ""), (9, ""), (8, ""), (9, "# edited\n")):
        with (package / "kinds_package.py").open("a") as file:
            file.write(addition)
        document = {"task": "shared", "batch": {"samples": 5}, "data": {"samples": samples}}
        stamps.append(
            entry_of("shared").data_stamp(load_document(Document(document), Tasks()).config)
        )
    assert stamps[0] == stamps[1]
    assert stamps[0] not in stamps[2:]


def test_an_installed_task_names_the_line_of_its_own_error(package: Path) -> None:
    (package / "kinds_package.py").write_text(FILE.replace("logits = model", "logits = modell"))
    config = load_document(Document({"task": "bare", "batch": {"samples": 5}}), Tasks()).config
    task = entry_of("bare").open(config, package)
    with pytest.raises(UserError, match=r"Kinds.loss\(\): NameError") as caught:
        task.losses(task.model(), {})
    assert "kinds_package.py:" in str(caught.value)
