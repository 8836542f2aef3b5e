"""The work of a sample of a user's own task: counted as torch calls it, or unknown with the reason;
and train.exact: auto, which goes by it.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.exact_auto import least_work
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.planner import plan
from samecurve.tasks import Tasks, open_task
from samecurve.tasks.adapter.two_samples import unfused
from samecurve.torch_engine.model.counted_work import TooManyOperationsError, WorkCounter

WIDTH = 24
TASK = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Rows:
    def __len__(self):
        return 200

    def __getitem__(self, ids):
        return {"x": np.ones((len(ids), 4, 24), np.float32) + ids[:, None, None] % 3}


class Net(nn.Module):
    def __init__(self, width, times):
        super().__init__()
        self.times = times
        self.first, self.last = nn.Linear(24, width), nn.Linear(width, 1)

    def forward(self, x):
        for _ in range(self.times):
            y = torch.tanh(self.first(x))
        return self.last(y)


class Task:
    def __init__(self, model):
        self.fields = {"width": 24, "times": 1, **model}
        self.calls = 0

    def model(self):
        return Net(**self.fields)

    def loss(self, model, batch):
        self.calls += 1
        out = model(batch["x"]).square()
        return Mean(out.sum(), out.numel())

    def train_data(self):
        return Rows()
"""
FIRST, LAST = 2 * 4 * WIDTH * WIDTH, 2 * 4 * WIDTH  # FLOP of the layers, forward, for a sample
LARGE = 3_000_000  # a width whose model is not tried with values: it takes 300 MB
CPUS = Machine(devices=(), links=(), host_bytes=64 << 30, cores=16)


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., Config]:
    def make(*changes: tuple[str, str], **sections: Any) -> Config:
        text = TASK
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "own.py").write_text(text)
        values = {"task": f"{tmp_path / 'own.py'}:Task", "batch": {"samples": 64}, **sections}
        return load_document(Document(values), Tasks()).config

    return make


def facts_of(config: Config) -> Facts:
    facts: Facts = open_task(config, "").facts()
    return facts


def test_the_loss_of_two_samples_is_counted_and_leaves_no_trace(
    config_of: Callable[..., Config],
) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    task = open_task(config_of(), "")
    facts = task.facts()
    assert facts.flops_per_sample == 3 * (FIRST + LAST)
    assert facts.repeats.operations == 5  # a product, tanh, a product, square, sum
    assert facts.flops_unknown == ""
    assert task.task.calls == 0
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert random.getstate() == states[2]


def test_layers_that_are_used_again_cost_as_more_layers(config_of: Callable[..., Config]) -> None:
    """A loop calls the same two arrays over and over, in every microbatch."""
    once, often = (facts_of(config_of(model={"times": times})) for times in (1, 50))
    assert often.flops_per_sample == 3 * (50 * FIRST + LAST)
    assert often.repeats.operations > 50
    assert least_work(often, compiled=False) > 4 * least_work(once, compiled=False) > 0


@pytest.mark.parametrize(
    ("changes", "model", "flops", "says"),
    [
        # a model too large to be tried with values
        ([], {"width": LARGE}, 3 * 8 * (WIDTH + 1) * LARGE, "3 x those of a forward pass"),
        # what is not trained, and lies below what is, has a forward pass alone
        (
            [("self.times = times", "self.times = times\n        self.below = nn.Linear(24, 24)"),
             ("y = torch.tanh(self.first(x))", "y = torch.tanh(self.first(self.below(x)))")],
            {},
            FIRST + 2 * FIRST + 3 * LAST,
            "some weights are not trained",
        ),
        # rows of unlike length: the mean of eight, spread over the data
        (
            [("return Rows()", "return Items()\n\n    def collate(self, samples):\n"
              "        most = max(map(len, samples))\n"
              "        return {'x': np.stack([np.pad(s, ((0, most - len(s)), (0, 0)))"
              " for s in samples])}"),
             ("class Net", "class Items(torch.utils.data.Dataset):\n    def __len__(self):\n"
              "        return 8\n\n    def __getitem__(self, i):\n"
              "        return np.ones((1 + i, 24), np.float32)\n\n\nclass Net")],
            {},
            3 * (FIRST + LAST) / 4 * 4.5,
            "(8 samples)",
        ),
    ],
)  # fmt: skip
def test_what_is_counted_without_values(
    config_of: Callable[..., Config],
    changes: list[tuple[str, str]],
    model: Mapping[str, Any],
    flops: float,
    says: str,
) -> None:
    freeze = {"groups": [{"match": "below.*", "freeze": True}]} if "below" in str(changes) else {}
    facts = facts_of(config_of(*changes, model=model, optimizer=freeze))
    assert facts.flops_per_sample == flops
    assert says in facts.formulas["flops"]


@pytest.mark.parametrize(
    ("changes", "model", "why"),
    [
        (
            [("out = model", "assert batch['x'].sum() > 0\n        out = model")],
            {"width": LARGE},
            "the loss reads values",
        ),
        (
            [("out = model", "batch['x'].numpy()\n        out = model")],
            {"width": LARGE},
            "the loss reads values",
        ),
        (
            [("out = model", "1 / 0\n        out = model")],
            {},
            "without values the loss ends with ZeroDivisionError: division by zero",
        ),
        (
            [("class Net", '@torch.library.custom_op("own_work::twice", mutates_args=())\n'
              "def twice(x: torch.Tensor) -> torch.Tensor:\n    return 2 * x\n\n\nclass Net"),
             ("square()", "square() + twice(batch['x']).mean()")],
            {},
            "the loss calls own_work.twice.default, a kernel of its own",
        ),
        (
            [("self.calls = 0", "self.calls = 0\n"
              "        self.phases = {'a': 'first.*', 'b': 'last.*'}"),
             ("model, batch):", "model, batch, phase):")],
            {},
            "a step has several phases",
        ),
        (
            [("self.first(x)", "x * self.first.weight.mean()"),
             ("self.last(y)", "y * self.last.bias + self.last.weight.mean()")],
            {},
            "no product of matrices",
        ),
    ],
)  # fmt: skip
def test_work_that_nobody_can_know_is_said_in_the_plan(
    config_of: Callable[..., Config],
    changes: list[tuple[str, str]],
    model: Mapping[str, Any],
    why: str,
) -> None:
    config = config_of(*changes, model=model, devices={"threads": 1})
    facts = facts_of(config)
    assert facts.flops_per_sample is None
    assert why in facts.flops_unknown
    chosen = plan(config, CPUS, facts)
    assert not chosen.same_bits
    says = f"the work of a sample is not known: {facts.flops_unknown}; --exact asks for it"
    assert chosen.reasons["exact_auto"] == says


def test_what_a_class_tells_itself_wins(config_of: Callable[..., Config]) -> None:
    own = "    def facts(self):\n        return {'flops_per_sample': 5.0}\n\n    def model(self):"
    facts = facts_of(config_of(("    def model(self):", own)))
    assert (facts.flops_per_sample, facts.repeats.operations) == (5.0, 0)


@pytest.mark.parametrize("use", ["cpu:1", "cpu:2", "cpu:8"])
@pytest.mark.parametrize(("width", "is_exact"), [(16384, True), (32, False)])
def test_auto_decides_for_a_users_file_alike_on_any_devices(
    config_of: Callable[..., Config], use: str, width: int, *, is_exact: bool
) -> None:
    wide = {"model": {"width": width}, "batch": {"samples": 4096}}
    config = config_of(**wide, devices={"use": use, "threads": 1})
    chosen = plan(config, CPUS, facts_of(config))
    assert chosen.same_bits == is_exact
    assert chosen.flops.flops_per_step


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            [("nn.Linear(24, width)", "nn.Embedding(30, width, sparse=True)"),
             ("self.first(x)", "self.first(x.long())")],
            "a layer gives sparse gradients",
        ),
        (
            [("for _ in range(self.times):", "from torch.utils.checkpoint import checkpoint\n"
              "        x = x.clone().requires_grad_()\n        for _ in range(2):"),
             ("torch.tanh(self.first(x))",
              "torch.tanh(checkpoint(self.first, x, use_reentrant=True)); x = y")],
            "a backward pass adds to the same gradient several times",
        ),
        (
            [("out = model", "torch.empty(5).put_(torch.arange(3), torch.ones(3))\n"
              "        out = model")],
            "put_ does not have a deterministic implementation",
        ),
    ],
)  # fmt: skip
def test_what_an_exact_run_would_refuse_is_found_before(
    config_of: Callable[..., Config], changes: list[tuple[str, str]], why: str
) -> None:
    """A run that nobody asked to be exact is not refused."""
    config = config_of(*changes)
    chosen = plan(config, CPUS, facts_of(config))
    assert not chosen.same_bits
    assert why in chosen.reasons["exact_auto"]
    assert not torch.are_deterministic_algorithms_enabled()
    ordinary = config_of(*changes, train={"exact": False})
    assert facts_of(ordinary).repeats.not_same_bits == ""  # nothing is tried


def test_a_large_model_is_tried_without_values(config_of: Callable[..., Config]) -> None:
    sparse = [
        ("nn.Linear(24, width), nn.Linear(width, 1)",
         "nn.Embedding(width, 24, sparse=True), nn.Linear(24, 1)"),
        ("self.first(x)", "self.first(x.long())"),
    ]  # fmt: skip
    facts = facts_of(config_of(*sparse, model={"width": LARGE}))
    assert facts.params > 50_000_000
    assert facts.repeats.not_same_bits == "a layer gives sparse gradients"


def counted_in(run: Callable[[], object]) -> int:
    work = WorkCounter()
    with torch.no_grad(), unfused(), work:
        run()
    assert work.unknown == {}
    return work.flops


def test_kernels_that_fuse_products_are_counted() -> None:
    """Torch's own table of formulas lacks what a CPU runs for these, or they hide in one kernel."""
    x, q = torch.randn(2, 10, 16), torch.randn(2, 4, 10, 4)
    attention = 2 * 2 * 2 * 4 * 10 * 10 * 4
    assert counted_in(lambda: F.scaled_dot_product_attention(q, q, q)) == attention
    lstm = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True)
    assert counted_in(lambda: lstm(x)) == 2 * 20 * 64 * 2 * (32 + 48)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    assert counted_in(lambda: layer(x)) == 2 * 20 * (4 * 256 + 2 * 512) + attention


def test_counting_ends_after_so_many_operations() -> None:
    x = torch.ones(1)
    with WorkCounter(10):
        for _ in range(10):
            x.exp()
        with pytest.raises(TooManyOperationsError, match="more than 10 operations"):
            x.exp()
