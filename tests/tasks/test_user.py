"""A user task: one file, loaded, checked and adapted; each mistake is told with its remedy."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import losses, samecurve
from samecurve import Initial, Mean
from samecurve.core.config.document import Document, read_document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.fixed import is_same_data
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.planner import plan
from samecurve.errors import InvalidConfigError, UserError
from samecurve.tasks import Tasks, entry_of, open_task
from samecurve.tasks.adapter.torch_adapter import TorchAdapter
from samecurve.torch_engine.model.model_setup import cast_weights
from samecurve.torch_engine.precision import as_weights

EXAMPLES = Path(__file__).parents[2] / "examples"
WHOLE = """
import numpy as np
import torch
from torch import nn
from samecurve import Initial, Mean


class Rows:
    def __init__(self, count, shift=0.0):
        self.x = np.arange(count * 3, dtype=np.float32).reshape(count, 3) / 10 + shift

    def __len__(self):
        return len(self.x)

    def __getitem__(self, ids):
        return {"x": self.x[ids], "y": torch.from_numpy(ids % 5)}


class Items(torch.utils.data.Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        return {"x": torch.from_numpy(self.inner.x[i]), "y": i % 5}


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.stem, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x):
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return x.square().sum(-1)


class My:
    coupled = ("contrast",)

    def __init__(self, model, data):
        self.depth, self.data = model.get("depth", 3), data

    def model(self):
        return Net(self.depth)

    def initial(self, name, shape):
        return Initial(0.02) if name == "stem.weight" else None

    def loss(self, model, batch):
        return Mean(model(batch["x"]).sum(), len(batch["x"]))

    def metrics(self, model, batch):
        fives = (batch["y"] == 0).sum()
        size = Mean(model(batch["x"]).sqrt().sum(), len(batch["x"]))
        return {"size": size, "fives": Mean(fives, torch.tensor(1))}

    def train_data(self):
        rows = Rows(23, self.data.get("shift", 0.0))
        if self.data.get("items"):
            return Items(rows)
        return rows

    def eval_data(self):
        return Rows(7)
"""


def config_of(task: object, **sections: Any) -> Config:
    return load_document(
        Document({"task": task, "batch": {"samples": 4}, **sections}), Tasks()
    ).config


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Config]:
    """A file with some of its text replaced, and the config of its class."""

    def made(
        old: str = "", new: str = "", name: str = "My", text: str = WHOLE, **sections: Any
    ) -> Config:
        assert old in text
        path = tmp_path / "mine.py"
        path.write_text(text.replace(old, new) if old else text)
        return config_of(f"{path}:{name}", **sections)

    return made


def opened(config: Config) -> TorchAdapter:
    task = open_task(config, "")
    assert isinstance(task, TorchAdapter)
    return task


def said(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def batch_of(task: TorchAdapter, count: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(array) for name, array in task.train_data()[np.arange(count)].items()
    }


def test_importing_samecurve_imports_nothing_heavy() -> None:
    """`from samecurve import Mean` too costs no numpy, pydantic or torch; a wrong name is told as
    Python tells it.
    """
    code = (
        "import sys, samecurve; samecurve.Mean; print(sorted({'torch', 'numpy', 'pydantic'} &"
        " set(sys.modules)) if 'Mean' in samecurve.__all__ else 'missing')"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
    assert (Mean._fields, Initial(1.0).mean) == (("sum", "weight"), 0.0)
    with pytest.raises(ImportError, match="cannot import name 'Meen'"):
        from samecurve import Meen  # noqa: F401


def test_the_sections_are_free_and_the_rest_is_not(write: Callable[..., Config]) -> None:
    config = write(
        model={"depth": 2, "max_seq_len": 9, "inner": {"a": [1, 2.5]}},
        data={"prefetch": 0, "shift": 1.5},
    )
    assert config.model.model_extra == {"depth": 2, "max_seq_len": 9, "inner": {"a": [1, 2.5]}}
    assert (config.data.model_extra, config.data.prefetch) == ({"shift": 1.5}, 0)
    again = load_document(Document(config.model_dump(mode="json")), Tasks()).config
    assert again.model_dump() == config.model_dump()  # as a run's config.yaml goes to its ranks
    with pytest.raises(
        InvalidConfigError, match=r"data: should be finite numbers(.|\n)*train\.stepz: unknown key"
    ):
        write(train={"stepz": 3}, data={"deep": [{"x": float("nan")}]})


@pytest.mark.parametrize(
    "task", ["langage", "mine.py", "mine.py:", "mine.txt:My", "mine.py:3", 7, ["language"], None]
)
def test_what_is_no_task(task: object) -> None:
    assert not Tasks().knows(task)


def test_facts_are_those_of_the_class(write: Callable[..., Config]) -> None:
    facts = opened(write(model={"depth": 5})).facts()
    norm, stem, block = 8, 16, 20
    assert (facts.data.samples, facts.data.eval_samples, facts.params, facts.trainable) == (
        23,
        7,
        norm + stem + 5 * block,
        norm + stem + 5 * block,
    )
    assert (facts.blocks, facts.block_params, facts.data.tokens_per_sample) == (5, block, 1)
    assert (facts.bytes_per_sample, facts.flops_per_sample) == (None, 6 * (3 * 4 + 5 * 4 * 4))
    assert facts.coupled[0] == "contrast"
    assert any("norm" in name.lower() for name in facts.coupled[1:])


def test_facts_with_arrays_alone_suffice_and_build_nothing(write: Callable[..., Config]) -> None:
    arrays = (
        "    def model(self):\n",
        "    def facts(self):\n"
        "        shapes = {'stem.weight': (4, 3), 'stem.bias': (4,), 'norm.mean': (4,)}\n"
        "        return {'arrays': shapes, 'buffers': ('norm.mean',)}\n\n"
        "    def model(self):\n"
        "        1 / 0\n",
    )
    facts = opened(write(*arrays)).facts()
    assert (facts.params, facts.trainable, facts.blocks) == (16, 16, 0)
    freeze = {"groups": [{"match": "*.bias", "freeze": True}]}
    frozen = write(*arrays, optimizer=freeze, train={"allow_coupled": True})
    facts = opened(frozen).facts()
    assert (facts.params, facts.trainable, facts.model.frozen) == (16, 12, ("stem.bias",))
    machine = Machine(devices=(), links=(), host_bytes=8 << 30, cores=2)
    assert plan(frozen, machine, facts).memory


def test_dropout_is_found(write: Callable[..., Config]) -> None:
    """In layers of its own and within others: all masks follow the sample."""
    facts = opened(
        write(
            "super().__init__()\n        self.stem",
            "super().__init__()\n        self.drop, self.off = nn.Dropout(0.1), nn.Dropout(0.0)\n"
            "        self.memory = nn.LSTM(4, 4, 2, dropout=0.1)\n        self.stem",
        )
    ).facts()
    assert facts.keyed_dropout == ("drop", "memory")
    assert opened(write()).facts().keyed_dropout == ()


def test_complex_frozen_and_value_bound_models_are_counted(write: Callable[..., Config]) -> None:
    """A complex weight is two scalars; a frozen one is held but not trained; a model that looks at
    its values is built really.
    """
    odd = (
        "super().__init__()\n        self.stem",
        """super().__init__()
        self.waves = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        assert self.scale.sum().item() == 2
        self.stem""",
    )
    whole, more = opened(write(*odd)).facts(), opened(write()).facts()
    assert (whole.params - more.params, whole.trainable - more.trainable) == (14, 12)


def test_the_class_is_called_with_what_it_asks_for(write: Callable[..., Config]) -> None:
    """Both mappings, one of them, or none; `prefetch` is the program's own."""
    head = (
        'def __init__(self, model, data):\n        self.depth, self.data = model.get("depth", 3),'
        " data"
    )
    bodies = {
        "": (head, "depth, data = 2, {}"),
        "data": (
            head,
            (
                "depth = 2\n\n    def __init__(self, data):\n        assert 'prefetch' not in"
                " data\n        self.data = data"
            ),
        ),
        "all": (
            head,
            (
                "depth = 2\n\n    def __init__(self, **sections):\n        self.data ="
                " sections['data']"
            ),
        ),
    }
    for old, new in bodies.values():
        assert opened(write(old, new, data={"prefetch": 1})).facts().blocks == 2
    assert "__init__() missing 1 required positional argument: 'more'" in said(
        lambda: opened(
            write("def __init__(self, model, data)", "def __init__(self, model, data, more)")
        )
    )


def test_a_torch_dataset_is_stacked_to_what_the_source_gives(write: Callable[..., Config]) -> None:
    ids = np.array([5, 2, 22])
    source, items = opened(write()), opened(write(data={"items": True}))
    rows, stacked = source.train_data()[ids], items.train_data()[ids]
    assert list(rows) == list(stacked) == ["x", "y"]
    for name, column in rows.items():
        np.testing.assert_array_equal(column, stacked[name])
        assert column.dtype == stacked[name].dtype
    assert source.fingerprint() == items.fingerprint()


@pytest.mark.parametrize(
    ("item", "names"),
    [
        ("(self.inner.x[i], i)", ["0", "1"]),
        ("[self.inner.x[i]]", ["0"]),
        ("self.inner.x[i]", ["0"]),
        ("torch.tensor(1.0 + i)", ["0"]),
    ],
)
def test_items_without_names_get_their_places(
    item: str, names: list[str], write: Callable[..., Config]
) -> None:
    task = opened(
        write(
            'return {"x": torch.from_numpy(self.inner.x[i]), "y": i % 5}',
            f"return {item}",
            data={"items": True},
        )
    )
    rows = task.train_data()[np.array([3, 1])]
    assert list(rows) == names
    assert all(len(column) == 2 for column in rows.values())


def test_the_fingerprint_follows_the_data(write: Callable[..., Config]) -> None:
    """Its length, its values, and its own fingerprint() where it has one; not the model."""
    first = opened(write()).fingerprint()
    assert first == opened(write(model={"depth": 1})).fingerprint()
    assert (
        len(
            {
                first,
                opened(write(data={"shift": 0.5})).fingerprint(),
                opened(write("Rows(23", "Rows(24")).fingerprint(),
            }
        )
        == 3
    )
    own = ("class Rows:", "class Rows:\n    def fingerprint(self):\n        return 'mine-1'\n")
    assert opened(write(*own)).fingerprint() == f"mine-1, and by rows: {first}"


def test_data_drawn_anew_in_each_process_is_no_run_s_data(write: Callable[..., Config]) -> None:
    """Its rows repeat within a process, and its own fingerprint() says nothing of them. A run of a
    version that kept that fingerprint alone goes on.
    """
    drawn = ("+ shift", "+ np.random.default_rng().random((count, 3)).astype(np.float32)")
    known = WHOLE.replace("class My:\n", "class My:\n" + KNOWN)
    first, second = (opened(write(*drawn, text=known)).fingerprint() for _ in range(2))
    assert not is_same_data(first, second)
    steady = opened(write(text=known)).fingerprint()
    assert is_same_data(steady, opened(write(text=known)).fingerprint())
    assert is_same_data("v1", steady)
    assert not is_same_data("v2", steady)
    assert not is_same_data("", "other rows")


def test_data_drawn_from_global_generators_is_the_same_in_every_process(
    write: Callable[..., Config],
) -> None:
    """As in a script that seeds them first; the held-out rows are other draws, and this process'
    own numbers are left alone.
    """
    drawn = (
        "self.x = np.arange(count * 3, dtype=np.float32).reshape(count, 3) / 10 + shift",
        "self.x = torch.randn(count, 3).numpy() + np.random.rand(count, 3).astype(np.float32)",
    )
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, other = opened(write(*drawn)), opened(write(*drawn, train={"seed": 5}))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.randn(3)
    second = opened(write(*drawn))
    assert first.fingerprint() == second.fingerprint() != other.fingerprint()
    held_out = first.eval_data()
    assert held_out is not None
    assert (first.train_data()[np.arange(7)]["x"] != held_out[np.arange(7)]["x"]).any()


KNOWN = "    def fingerprint(self):\n        return 'v1'\n\n"
PREPARED = (
    KNOWN
    + "    metric_names = ('size', 'fives')\n\n"
    + "    def prepare(self, device, part):\n        yield 1, 1\n\n"
)


@pytest.mark.parametrize(
    "known", [("", ""), ("class Rows:\n", KNOWN), ("class My:\n", KNOWN)], ids=["", "data", "task"]
)
def test_rows_that_change_are_refused_whatever_names_the_data(
    write: Callable[..., Config], known: tuple[str, str]
) -> None:
    """A fingerprint() says which data this is, and not that its rows repeat."""
    noise = ('"x": self.x[ids],', '"x": self.x[ids] + np.random.randn(len(ids), 1),')
    text = WHOLE.replace(known[0], "".join(known)) if known[0] else WHOLE
    message = said(lambda: opened(write(*noise, text=text)).facts())
    assert "My.train_data() gives other values when a sample is read again" in message
    assert "samecurve.sample_rng(id)" in message
    assert "samecurve.rng(batch)" in message
    assert "A fingerprint() does not help" in message
    steady = opened(write(text=text)).facts().fingerprint
    assert steady.startswith("v1, and by rows: 16 rows: ") == bool(known[0])


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        ("np.random.randn(1)", "np.random"),
        ("torch.randn(1).numpy()", "torch"),
        ("self.rng.normal(size=1)", "self.rng"),
    ],
)
def test_augmentations_that_are_kept_are_refused(
    write: Callable[..., Config], draw: str, named: str
) -> None:
    """Rows that are drawn when they are first read repeat in one process, and in no other one."""
    begun = "        self.x = np.arange("
    text = WHOLE.replace(
        begun, f"        self.kept, self.rng = {{}}, np.random.default_rng(0)\n{begun}"
    )
    read = '        return {"x": self.x[ids], '
    kept = f"""\
        for i in ids.tolist():
            if i not in self.kept:
                self.kept[i] = self.x[i] + {draw}
        return {{"x": np.float32([self.kept[i] for i in ids.tolist()]), """
    message = said(lambda: opened(write(read, kept, text=text)).facts())
    assert f"My.train_data() draws numbers of {named} when a sample is first read" in message
    assert "samecurve.sample_rng(id)" in message


@pytest.mark.parametrize(
    "seeds",
    [
        "np.random.seed(i); drawn = np.random.randn(1)",
        "torch.manual_seed(i); drawn = torch.randn(1).numpy()",
        "self.rng = np.random.default_rng(i); drawn = self.rng.normal(size=1)",
    ],
)
def test_data_that_seed_a_generator_at_each_reading_are_taken(
    write: Callable[..., Config], seeds: str
) -> None:
    """Their rows follow from the ids, though a second reading leaves the generator as it is."""
    read = '        return {"x": self.x[ids], '
    seeded = f"""\
        rows = []
        for i in ids.tolist():
            {seeds}
            rows.append(self.x[i] + drawn)
        return {{"x": np.float32(rows), """
    assert opened(write(read, seeded)).facts().fingerprint


def test_rows_of_prepared_files_are_read_again_once_the_files_are_made(
    write: Callable[..., Config],
) -> None:
    noise = ('"x": self.x[ids],', '"x": self.x[ids] + np.random.randn(len(ids), 1),')
    prepared = opened(write(*noise, text=WHOLE.replace("class My:\n", "class My:\n" + PREPARED)))
    assert prepared.prepare
    assert prepared.fingerprint() == "v1"
    text = said(prepared.check_rows)
    assert "My.train_data() gives other values when a sample is read again" in text


def test_what_the_message_offers_for_random_rows_is_taken(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    task = opened(config_of(f"{tmp_path / 'drawn.py'}:Drawn"))
    assert task.facts().fingerprint.startswith("v1, ")  # the rows were read again, and are the same
    rows = task.train_data()
    first, later = (rows.read(np.arange(7), epoch)["x"] for epoch in (0, 1))
    assert (first[:, 1] != later[:, 1]).all()


@pytest.mark.long  # two runs of real processes; the test above holds that the data is taken
def test_what_the_message_offers_for_random_rows_is_one_curve_on_any_ranks(tmp_path: Path) -> None:
    """Keyed draws in the data, and draws in the loss; a fingerprint() beside them changes none."""
    (tmp_path / "drawn.py").write_text(DRAWN)
    settings = ["batch.samples=5", "train.steps=3", "train.precision=f64", "train.eval_every=0"]
    flags = [part for setting in settings for part in ("--set", setting)]
    train = ["train", "--set", "task=drawn.py:Drawn", *flags, "--save-dir"]
    for world in (1, 2):
        samecurve(*train, world, "--devices", f"cpu:{world}", cwd=tmp_path)
    one, two = (losses(tmp_path / str(world)) for world in (1, 2))
    assert one == pytest.approx(two, rel=1e-12)
    assert len(set(one)) == 3


DRAWN = """
import numpy as np
import samecurve
import torch


class Data:
    def __len__(self):
        return 7

    def __getitem__(self, ids, epoch):
        noise = [samecurve.sample_rng(i, epoch).normal() for i in ids]
        return {"x": np.stack([ids, noise], 1).astype(np.float64)}

    def fingerprint(self):
        return "v1"


class Drawn:
    def model(self):
        return torch.nn.Linear(2, 1)

    def loss(self, model, batch):
        x = batch["x"]
        noise = samecurve.rng(batch).normal(2) + torch.rand(len(x), 1).to(x)
        return samecurve.Mean((model(x + noise) - 1).square().sum(), len(x))

    def train_data(self):
        return Data()
"""


def test_rows_that_depend_on_what_is_read_with_them_are_refused(
    write: Callable[..., Config],
) -> None:
    """As BLAS rounds a product in float32 by its number of rows: here by hand, on any machine."""
    rounded = ('"x": self.x[ids],', '"x": self.x[ids] * np.float32(1 + 1e-6 * (len(ids) > 1)),')
    text = said(lambda: opened(write(*rounded)).facts())
    assert 'gives "x" of row 0 otherwise when it is read alone: it differs by 1.9e-07' in text
    assert "a matrix product (x @ w) rounds by the number of rows" in text.lower()
    named = WHOLE.replace("class Rows:\n", "class Rows:\n" + KNOWN)
    assert "otherwise when it is read alone" in said(
        lambda: opened(write(*rounded, text=named)).facts()
    )
    padded = ('"x": self.x[ids],', '"x": self.x[ids], "tokens": np.zeros((len(ids), len(ids))),')
    assert opened(write(*padded)).facts().data.samples == 23


def test_evaluation_is_sums_divided_once(write: Callable[..., Config]) -> None:
    """Figures of unequal batches, added, give those of all rows at once; a batch's own means would
    not.
    """
    task = opened(write())
    assert tuple(task.eval_sums()) == (
        "loss.sum",
        "loss.weight",
        "size.sum",
        "size.weight",
        "fives.sum",
        "fives.weight",
    )
    torch.manual_seed(0)
    model, rows = task.model().double().eval(), batch_of(task, 23)
    rows["x"] = rows["x"].double()
    with torch.no_grad():
        whole = task.evaluate(model, rows)
        parts = [
            task.evaluate(model, {name: column[cut] for name, column in rows.items()})
            for cut in (slice(0, 4), slice(4, 23))
        ]
    sums = {name: sum(float(part[name]) for part in parts) for name in task.eval_sums()}
    found = task.summarize(sums)
    assert found["loss"] == pytest.approx(float(whole["loss.sum"]) / 23, rel=1e-12)
    assert found["size"] == pytest.approx(float(whole["size.sum"]) / 23, rel=1e-12)
    assert found["fives"] == 5 / 2
    mean_of_means = sum(float(part["loss.sum"]) / float(part["loss.weight"]) for part in parts) / 2
    assert isinstance(found["loss"], float)
    assert abs(mean_of_means / found["loss"] - 1) > 1e-2


def test_without_metrics_the_loss_is_measured(write: Callable[..., Config]) -> None:
    task = opened(write("def metrics", "def others"))
    assert tuple(task.eval_sums()) == ("loss.sum", "loss.weight")
    assert task.summarize({"loss.sum": 6.0, "loss.weight": 4.0}) == {"loss": 1.5}
    assert np.isnan(task.summarize({"loss.sum": 0.0, "loss.weight": 0.0})["loss"])


def test_metrics_that_look_at_values_are_learnt_on_a_real_model(
    write: Callable[..., Config],
) -> None:
    task = opened(
        write(
            'return {"size":',
            "assert model(batch['x']).sum().item() > 0\n        return {\"size\":",
        )
    )
    assert tuple(task.eval_sums())[2::2] == ("size.sum", "fives.sum")


def test_initial_values_are_the_users_or_the_modules(write: Callable[..., Config]) -> None:
    task = opened(write())
    assert task.initial("stem.weight", (4, 3)) == Initial(0.02, 0.0)
    assert task.initial("stem.bias", (4,)) is None
    assert opened(write("def initial", "def other")).initial("stem.weight", (4, 3)) is None
    assert "initial(stem.weight) returns float" in said(
        lambda: opened(write("return Initial(0.02)", "return 0.02")).initial("stem.weight", (4, 3))
    )
    assert (task.sample(None, 0), task.assets()) == ([], {})


def test_a_file_is_a_module_with_its_neighbours(
    tmp_path: Path, write: Callable[..., Config]
) -> None:
    """Imported while it loads or later, in a method; its objects can be pickled, its dataclasses
    made; once in a process.
    """
    (tmp_path / "early_neighbour.py").write_text("COUNT = 11\n")
    (tmp_path / "late_neighbour.py").write_text("COUNT = 12\n")
    config = write(
        "class Rows:",
        "from dataclasses import dataclass\nimport early_neighbour\n\n\n@dataclass\nclass Point:\n "
        "   x: 'int' = early_neighbour.COUNT\n\n\nclass Rows:",
    )
    task, path = opened(config), sys.path.copy()
    module = sys.modules[type(task.model()).__module__]
    assert pickle.loads(pickle.dumps(module.Point())) == module.Point(11)
    assert type(opened(config).model()) is type(task.model())
    assert path[0] != str(tmp_path)
    later = opened(
        write("rows = Rows(23,", "import late_neighbour\n        rows = Rows(late_neighbour.COUNT,")
    )
    assert len(later.train_data()) == 12


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "def loss",
            "def lozz",
            ["My has no loss()", "loss(self, model, batch[, step"],
        ),
        (
            "def train_data(self):\n        rows",
            "def rows(self):\n        rows",
            ["My has no train_data()", "__getitem__(ids)"],
        ),
        (
            "self.depth, self.data",
            "self.model = model\n        self.depth, self.data",
            ["sets self.model, which hides the method model()", "self.model_fields"],
        ),
        (
            'coupled = ("contrast",)',
            'coupled = "contrast"',
            ["My.coupled is 'contrast'", '("contrastive loss",)'],
        ),
        (
            'if self.data.get("items"):',
            "return iter([])\n        if self.data:",
            ["of type list_iterator, has no __getitem__", "a torch Dataset (not its DataLoader)"],
        ),
        (
            "def __len__",
            "def size",
            [
                "of type Rows, has no length (__len__)",
                "which samples a step takes follows from their number",
            ],
        ),
        (
            'if self.data.get("items"):',
            "return torch.utils.data.ChainDataset([])\n        if self.data:",
            ["is read in its own order, not by id"],
        ),
        ("Rows(23", "Rows(0", ["My.train_data() has no sample"]),
        (
            'if self.data.get("items"):',
            "return 1 / 0\n        if self.data:",
            ["My.train_data(): ZeroDivisionError: division by zero", "mine.py:65"],
        ),
    ],
)
def test_mistakes_told_when_the_task_is_opened(
    old: str, new: str, words: list[str], write: Callable[..., Config]
) -> None:
    text = said(lambda: opened(write(old, new)))
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "return Net(self.depth)",
            "return 3",
            ["My.model() returns int, not a torch.nn.Module", "built anew"],
        ),
        (
            "return Net(self.depth)",
            "return Net(self.depth).requires_grad_(False)",
            ["no parameter to train"],
        ),
        (
            "return Net(self.depth)",
            "return Net(self.deep)",
            ["My.model(): AttributeError: 'My' object has no attribute 'deep'", "mine.py:50"],
        ),
        (
            '"y": torch.from_numpy(ids % 5)',
            '"y": [str(i) for i in ids]',
            ['gives "y" as <U2, not as numbers'],
        ),
        (
            '"y": torch.from_numpy(ids % 5)',
            '"y": ids[:3]',
            ['gives "y" of shape (3,) for 16 ids', "one row an id"],
        ),
        (
            'return {"x": self.x[ids], "y": torch.from_numpy(ids % 5)}',
            "return self.x[ids]",
            ["gives ndarray for 16 ids", "{name: array with one row an id}"],
        ),
        (
            'Mean(model(batch["x"]).sum(), len(batch["x"]))',
            'Mean(model(batch["x"]).mean(), len(batch["x"]))',
            ["My.loss() gives the sum ", "that is their mean", 'reduction="sum"'],
        ),
        (
            'Mean(model(batch["x"]).sum(), len(batch["x"]))',
            'Mean(model(batch["x"]).mean(), 1)',
            ["gives weight 1 for two samples as for each of them alone"],
        ),
        (
            "super().__init__()",
            "pass",
            ["before Module.__init__() call", "super().__init__() as the first line"],
        ),
        (
            "def __init__(self, model, data):\n",
            "def begin(self, model, data):\n",
            ["object has no attribute 'data'", "def __init__(self, model, data): self.data = ..."],
        ),
    ],
)
def test_mistakes_told_when_it_is_described(
    old: str, new: str, words: list[str], write: Callable[..., Config]
) -> None:
    text = said(lambda: opened(write(old, new)).facts())
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ('{"x": self.inner.x[i][: 1 + i % 2]}', ['gives "x" of shapes (1,) and (2,)', "pad them"]),
        ('{"x" if i else "z": 1}', ["items of unlike parts"]),
    ],
)
def test_mistakes_of_items(item: str, words: list[str], write: Callable[..., Config]) -> None:
    text = said(
        lambda: opened(
            write(
                'return {"x": torch.from_numpy(self.inner.x[i]), "y": i % 5}',
                f"return {item}",
                data={"items": True},
            )
        ).facts()
    )
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "model(batch['x']).mean()",
            [
                "My.loss() returns Tensor of shape (), not a samecurve.Mean",
                'reduction="sum"',
                "a mean of means would depend on the number of devices",
            ],
        ),
        ("(model(batch['x']).sum(), 3)", ["returns tuple, not a samecurve.Mean"]),
        (
            "Mean(model(batch['x']), 3)",
            [
                "the sum of My.loss() is a torch.float32 tensor of shape (4,)",
                "added over what was counted",
            ],
        ),
        ("Mean(model(batch['x']).sum().item(), 3)", ["is of type float, not a tensor"]),
        ("Mean(model(batch['x']).sum().detach(), 3)", ["has no gradient", ".detach()"]),
        (
            "Mean(model(batch['x']).sum(), batch['y'])",
            ["the weight of My.loss() is a tensor of shape (4,), not one number"],
        ),
    ],
)
def test_a_loss_that_could_not_be_added_up(
    value: str, words: list[str], write: Callable[..., Config]
) -> None:
    task = opened(write('return Mean(model(batch["x"]).sum(), len(batch["x"]))', f"return {value}"))
    text = said(lambda: task.loss(task.model(), batch_of(task, 4)))
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("later", "says"),
    [
        ("None", "My.loss() returns NoneType"),
        ("3.0", "My.loss() returns float"),
        ("Mean(model(batch['x']), 5)", "the sum of My.loss() is a torch.float32 tensor"),
        ("Mean(model(batch['x']).sum(), '?')", "the weight of My.loss() is of type str"),
        ("Mean(model(batch['x']).sum(), -5)", "the weight of My.loss() is -5"),
        ("Mean(model(batch['x']).sum().detach(), 5)", "the sum of My.loss() has no gradient"),
    ],
)
def test_a_loss_that_is_none_only_later_is_named_too(
    later: str, says: str, write: Callable[..., Config]
) -> None:
    """In mid-run it was torch's own words, deep in a step. Evaluation runs without gradients."""
    first = 'Mean(model(batch["x"]).sum(), len(batch["x"]))'
    task = opened(write(f"return {first}", f"return {first} if len(batch['x']) == 4 else {later}"))
    model = task.model()
    with torch.no_grad():
        assert not task.loss(model, batch_of(task, 4)).sum.requires_grad
    assert task.loss(model, batch_of(task, 4)).sum.requires_grad
    assert says in said(lambda: task.loss(model, batch_of(task, 5)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[3]", ["My.metrics() returns list", "name -> Mean(sum, weight)"]),
        ('{"best_loss": Mean(1, 1)}', ['gives "best_loss", a name that is taken']),
        ('{"a": model(batch["x"]).mean()}', ['gives no single Mean as "a"']),
        ('{"a": Mean(1, model(batch["x"]))}', ['gives no single Mean as "a"']),
        (
            '{"a": Mean(1, 1)} if len(batch["x"]) == 1 else {"b": Mean(1, 1)}',
            ["gives b for one batch and a for another"],
        ),
    ],
)
def test_metrics_that_could_not_be_added_up(
    value: str, words: list[str], write: Callable[..., Config]
) -> None:
    head, tail = WHOLE.split("    def metrics(self, model, batch):\n")
    text = (
        f"{head}    def metrics(self, model, batch):\n        return {value}\n\n    def"
        f" train_data{tail.partition('def train_data')[2]}"
    )
    task = opened(write(text=text))
    assert [
        word
        for word in words
        if word
        not in (
            shown := said(
                lambda: (task.eval_sums(), task.evaluate(task.model(), batch_of(task, 4)))
            )
        )
    ] == [], shown


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (WHOLE, "Myy", ["has no class Myy; it has Rows, Items, Net, My", "did you mean My?"]),
        ("def My(): ...\nclass Other: ...\n", "My", ["has no class My; it has Other"]),
        ("x = 3\n", "My", ["has no class My; it has no class at all"]),
        (
            "x = 3\n\ndef broken(:\n    pass\n",
            "My",
            ["mine.py:3: not valid Python: invalid syntax", "correct the syntax of this line"],
        ),
    ],
)
def test_a_file_without_the_class_is_refused_before_it_is_run(
    text: str, name: str, words: list[str], write: Callable[..., Config]
) -> None:
    config = write(name=name, text=text)
    for call in (lambda: entry_of(config.task).data_stamp(config), lambda: open_task(config, "")):
        shown = said(call)
        assert [word for word in words if word not in shown] == [], shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import torch\nclass My: ...\nx = 1 / 0\n",
            ["mine.py:3: loading it: ZeroDivisionError: division by zero"],
        ),
        (
            "class My: ...\nimport no_such_library\n",
            [
                "mine.py:2",
                "ModuleNotFoundError",
                "install no_such_library, put it beside mine.py, or name its directory in",
            ],
        ),
        (
            "class My: ...\nraise SystemExit('no arguments')\n",
            ["mine.py:2: loading it: SystemExit: no arguments"],
        ),
        ("class My: ...\nimport spoilt_neighbour\n", ["spoilt_neighbour.py:1: not valid Python"]),
    ],
)
def test_a_file_that_can_not_be_run(
    text: str, words: list[str], tmp_path: Path, write: Callable[..., Config]
) -> None:
    (tmp_path / "spoilt_neighbour.py").write_text("a b\n")
    config, before = write(text=text), set(sys.modules)
    shown = said(lambda: open_task(config, ""))
    assert [word for word in words if word not in shown] == [], shown
    assert not [name for name in set(sys.modules) - before if name.startswith("samecurve_user_")]


def test_a_file_that_is_not_there(write: Callable[..., Config], tmp_path: Path) -> None:
    write()
    config = config_of(f"{tmp_path}/mime.py:My")
    assert (
        said(lambda: entry_of(config.task).data_stamp(config))
        == f"task: {tmp_path}/mime.py does not exist; this is {Path.cwd()}\n  remedy: did you mean"
        " mine.py?"
    )
    directory = config_of(f"{_directory(tmp_path)}:My")
    assert "can't be read: Is a directory" in said(
        lambda: entry_of(directory.task).data_stamp(directory)
    )


def _directory(home: Path) -> Path:
    made = home / "folder.py"
    made.mkdir()
    return made


def test_without_data_stamp_facts_are_obtained_anew(write: Callable[..., Config]) -> None:
    config = write()
    assert entry_of(config.task).data_stamp(config) is None
    imported = write("class My:", "from elsewhere import *\nclass Other:")  # My may come from there
    assert entry_of(imported.task).data_stamp(imported) is None


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses_by(name: str, seed: int) -> list[float]:
    """A plain loop in float64 over an example's own plan: its order, learning rates, optimizer and
    clipping, from these initial values.
    """
    document = read_document(EXAMPLES / f"{name}.yaml")
    document.set("devices.use", "cpu", "test")
    config = load_document(document, Tasks()).config
    task, fields = opened(config), config.optimizer
    made = plan(config, Machine(devices=(), links=(), host_bytes=8 << 30, cores=2), task.facts())
    torch.manual_seed(seed)
    model = cast_weights(task.model(), "f64").train()
    assert any(p.is_complex() for p in model.parameters()) == (name == "fft")
    adamw = fields.name == "adamw"
    optimizer = (
        torch.optim.AdamW(model.parameters(), fields.lr, fields.betas)
        if adamw
        else torch.optim.SGD(model.parameters(), fields.lr, fields.momentum)
    )
    losses = []
    for step in range(made.steps):
        rows = task.train_data()[made.order.ids(range(step, step + 1))[0]]
        batch = {name: as_weights(array, "f64") for name, array in rows.items()}
        loss = task.loss(model, {name: torch.from_numpy(array) for name, array in batch.items()})
        assert loss.sum.dtype == torch.float64
        losses.append(loss.sum.item() / float(loss.weight))
        optimizer.zero_grad()
        torch.autograd.backward(loss.sum / loss.weight)
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), fields.clip)
        optimizer.param_groups[0]["lr"] = made.lr_at(step)
        optimizer.step()
    return losses


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", ["fft", "batchnorm", pytest.param("ragged", marks=pytest.mark.long)]
)
def test_the_examples_learn_and_keep_to_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short files; with its YAML as it stands each learns whatever its initial values (no lucky
    seed); a float64 model computes in float64.
    """
    monkeypatch.chdir(EXAMPLES.parent)
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
    config = load_document(read_document(EXAMPLES / f"{name}.yaml"), Tasks()).config
    facts = opened(config).facts()
    assert facts.blocks == 3
    assert bool(facts.coupled) == (name == "batchnorm")
    assert facts.fingerprint == opened(config).fingerprint()
    for seed in range(3):
        losses = losses_by(name, seed)
        assert np.mean(losses[-5:]) < 0.5 * losses[0]
