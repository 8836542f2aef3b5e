"""Operations without a deterministic kernel on GPUs: the table, what a task's description finds of
it, and the plan's refusal. No GPU is needed: what is called is seen on CPUs.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nondeterministic_calls import CALLS, HARMLESS
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.nondeterministic import OPERATIONS, operation_in
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.diagnose.kernels import explain_nondeterministic
from samecurve.errors import NotSameBitsError, RunError, UserError
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.model.counted_work import WorkCounter
from samecurve.worker.rank_main import _reason_of as reason_of
from tiny import tiny_values


class Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of all operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch's compiler is imported, for seconds."""
        return False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def names_of(call: Callable[[], torch.Tensor]) -> tuple[str, ...]:
    with WorkCounter() as work:
        call()
    names: tuple[str, ...] = work.nondeterministic.names
    return names


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.words)
def test_a_call_of_each_operation_is_seen_and_calls_the_operator_that_raises(row: Any) -> None:
    call = CALLS[row.words]
    (name,) = names_of(call)
    assert name.startswith(row.words)
    with Called() as called:
        result = call()
        if result.requires_grad:
            result.sum().backward()  # type: ignore[no-untyped-call]
    assert row.raises in {name.removesuffix("_") for name in called.names} | called.names
    if row.in_backward:
        with torch.no_grad():
            assert names_of(call) == ()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_gpu_repeats_is_not_named(name: str) -> None:
    assert names_of(HARMLESS[name]) == ()


def test_torchs_own_list_is_covered() -> None:
    """Where torch documents another operation, the table is to be held against its code again."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    listed = text.rpartition("will throw a")[2].partition("In addition")[0]
    names = set(
        re.findall(r":(?:class|func):`torch\.(?:nn\.|functional\.|Tensor\.)*(\w+)`", listed)
    )
    names -= {"RuntimeError"}
    known = {
        "cumsum": "raises in no CUDA build from 2.8 to 2.13",
        "ReflectionPad2d": "raises in no CUDA build from 2.8 to 2.13",
        "kthvalue": "raises in 2.8, not in 2.13",
        "MaxPool3d": "replaced by torch.nn.functional in 2.13",
        "resize_": "of quantized tensors only",
        "NLLLoss": "cross_entropy of images or sequences",
        "CTCLoss": "ctc_loss",
        "MaxUnpool1d": "MaxUnpool2d",
    }
    words = " ".join(row.words for row in OPERATIONS)
    assert {name for name in names - set(known) if name not in words} == set()


def test_the_page_names_every_operation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exact.md").read_text()
    section = page.partition("### Operations that GPUs cannot repeat")[2].partition("\n\nCode")[0]
    names = {row.words.partition(" of ")[0] for row in OPERATIONS}
    assert {name for name in names if f"`{name}`" not in section} == set()


def test_torchs_errors_name_the_operation() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        with pytest.raises(RuntimeError) as raised:  # on CPUs too
            CALLS["put_"]()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert operation_in(str(raised.value)) == "put_"
    said = " does not have a deterministic implementation, but you set 'torch.use..."
    for alert, words in {
        "adaptive_avg_pool2d_backward_cuda": "AdaptiveAvgPool2d",
        "MyTask.loss(): RuntimeError: median CUDA with indices output": "median(dim)",
        "RuntimeError: upsample_bicubic2d_backward_out_cuda": "interpolate(mode='bicubic')",
        "a_new_one_cuda": "a_new_one_cuda",
        "own::kernel": "own::kernel",
    }.items():
        assert operation_in(alert + said) == words
    assert operation_in("out of memory") == ""


# --- plans

TASK = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, ids):
        x = np.ones((len(ids), 3, 8, 8), np.float32) + ids[:, None, None, None] % 3
        return {"x": x, "label": ids % 4, "pixels": x[:, 0].astype(np.int64) % 4}


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide = nn.Linear(8, width)
        self.pad = nn.ReflectionPad1d(1)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(self.wide(x)[..., :8])
        return BODY


class Task:
    def __init__(self, model):
        self.width = model.get("width", 8)

    def model(self):
        return Net(self.width)

    def loss(self, model, batch):
        out = model(batch["x"])
        return Mean(LOSS, len(out))

    def train_data(self):
        return Rows()
"""
POOLED = "self.head(self.body(x).flatten(1))"
OF_LABELS = 'F.cross_entropy(out, batch["label"], reduction="sum")'
OF_PIXELS = OF_LABELS.replace("label", "pixels")
LARGE = 6_000_000  # a width whose model is not tried with values
GPUS = Machine(
    devices=tuple(
        Device(kind="cuda", index=index, name="NVIDIA H100", memory=80 << 30) for index in (0, 1)
    ),
    links=(),
    host_bytes=64 << 30,
    cores=16,
)


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    """Plans a task on two GPUs. body: of the model's forward pass; loss: what is summed"""

    def make(
        body: str, loss: str = OF_LABELS, *, exact: bool | None = True, **sections: Any
    ) -> Plan:
        text = TASK.replace("BODY", body).replace("LOSS", loss)
        (tmp_path / "own.py").write_text(text)
        train = {} if exact is None else {"train": {"exact": exact}}
        values = {"task": f"{tmp_path / 'own.py'}:Task", "batch": {"samples": 8}}
        config = load_document(Document({**values, **train, **sections}), Tasks()).config
        return plan(config, GPUS, open_task(config, "").facts())

    return make


@pytest.mark.parametrize("width", [8, LARGE])
@pytest.mark.parametrize(
    ("body", "loss", "says"),
    [
        (POOLED, OF_LABELS, ("AdaptiveAvgPool2d (body.1) has", "AvgPool2d with a window")),
        (
            "x",
            OF_PIXELS,
            ("cross_entropy of images or sequences (own.py:42) has", 'reduction="none").sum()'),
        ),
        ("self.pad(x.flatten(1))", "out.sum()", ("ReflectionPad1d (pad) has", "x[..., places]")),
        (
            "self.body(x).flatten(2).median(2)[0]",
            OF_LABELS,
            (
                "AdaptiveAvgPool2d (body.1), median(dim) (own.py:30) have",
                "in place of median(dim): sort(dim).values",
            ),
        ),
    ],
)
def test_an_exact_run_on_gpus_is_refused_with_names_and_replacements(
    planned: Callable[..., Plan], body: str, loss: str, says: tuple[str, str], width: int
) -> None:
    with pytest.raises(NotSameBitsError) as refused:
        planned(body, loss, model={"width": width})
    error = refused.value
    assert error.cause == f"train.exact: {says[0]} no deterministic kernel on GPUs"
    assert error.remedy.startswith("--no-exact (train.exact: false), or --devices cpu; in place of")
    assert says[1] in error.remedy
    assert error.where == "train.exact"


def test_other_runs_are_not_refused(planned: Callable[..., Plan]) -> None:
    assert planned(POOLED, devices={"use": "cpu:2"}).same_bits
    assert not planned(POOLED, exact=False).same_bits
    assert not planned(POOLED, exact=None).same_bits  # auto
    assert planned("x.cumsum(1)", OF_PIXELS.replace('"sum"', '"none"') + ".sum()").same_bits
    # what nothing is learnt from has no backward pass
    pixels = "self.head(x.mean((2, 3)).repeat(1, 4)) + F.adaptive_avg_pool2d(x.detach(), 2).sum()"
    assert planned(pixels).same_bits


def test_what_is_not_trained_has_no_backward_pass(planned: Callable[..., Plan]) -> None:
    body = "self.head(x.mean((2, 3)).repeat(1, 4)) + self.pad(self.wide.weight).sum()"
    with pytest.raises(NotSameBitsError, match="ReflectionPad1d"):
        planned(body)
    frozen = {"groups": [{"match": match, "freeze": True} for match in ("wide.*", "first.*")]}
    assert planned(body, optimizer=frozen).same_bits


@pytest.mark.parametrize(("use", "place"), [("0,1", "GPUs"), ("cpu:2", "CPUs")])
def test_what_only_a_step_shows_becomes_the_same_refusal(
    planned: Callable[..., Plan], use: str, place: str
) -> None:
    said = "put_ does not have a deterministic implementation, but you set 'torch.use..."
    exact, ordinary = (planned("x", exact=exact, devices={"use": use}) for exact in (True, False))
    refused = explain_nondeterministic(RuntimeError(said), exact)
    assert refused is not None
    assert refused.cause == f"train.exact: put_ has no deterministic kernel on {place}"
    assert refused.remedy.startswith("--no-exact")
    of_line = UserError(f"Task.loss(): RuntimeError: {said}", "correct it", "own.py:3")
    refused = explain_nondeterministic(of_line, exact)
    assert refused is not None
    assert (refused.where, refused.cause[:17]) == ("own.py:3", "train.exact: put_")
    context: Any = SimpleNamespace(plan=exact)
    engine: Any = SimpleNamespace(peak_memory=int)
    error = RuntimeError(said)
    beats: Any = [SimpleNamespace(trained=trained) for trained in (False, True)]
    ends = [reason_of(error, context, engine, beat) for beat in beats]
    assert [type(end) for end in ends] == [NotSameBitsError, RunError]  # exit codes 2 and 1, not 75
    assert {str(end) for end in ends} == {str(explain_nondeterministic(error, exact))}
    assert explain_nondeterministic(RuntimeError(said), ordinary) is None
    assert explain_nondeterministic(RuntimeError("another"), exact) is None


def test_our_decoder_calls_none(corpus: Path, tmp_path: Path) -> None:
    """Its facts are told without torch, so that nothing is seen when it is described."""
    task = open_task(load_document(Document(tiny_values(corpus)), Tasks()).config, tmp_path)
    rows = {
        name: torch.from_numpy(array) for name, array in task.train_data()[np.arange(2)].items()
    }
    assert names_of(lambda: task.loss(task.model(), rows).sum) == ()
