"""What a class has beside our members: mistaken names and signatures are told, helpers are not."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_user import said
from torch import nn
from torch.utils.data import Dataset

from samecurve.tasks.adapter.members import check_names, check_signatures, form_of, other_trainers
from samecurve.tasks.protocol import MEMBERS


def with_methods(*names: str, base: type = object, **members: object) -> object:
    """A task whose methods are those, and these members."""
    methods = {name: lambda self, *_: self for name in names}
    return type("MyTask", (base,), {"model": lambda self: self, **methods, **members})()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("metric", "metrics(self, model, batch)"),
        ("eval_dataset", "eval_data(self)"),
        ("val_dataset", "eval_data(self)"),
        ("train_dataset", "train_data(self)"),
        ("train_dataloader", "train_data(self)"),
        (
            "configure_optimizers",
            "the config's optimizer section, or optimizer(self, params[, lr][, phase])",
        ),
        ("optimizers", "optimizer(self, params[, lr][, phase])"),
        ("training_step", "loss(self, model, batch[, step]"),
        ("validation_step", "train.eval_every in the config"),
        ("forward", "loss(self, model, batch[, step]"),
        ("compute_loss", "loss(self, model, batch[, step]"),
        ("lr_scheduler", "the config's schedule section"),
        ("on_train_batch_end", "after_step(self, model, step)"),
        ("afterstep", "after_step(self, model, step)"),
        ("collate_fn", "collate(self, samples"),
        ("load_state_dict", "what is to be saved belongs into the model"),
        ("exportt", "export(self, model, directory)"),
    ],
)
def test_a_name_that_is_meant_for_a_trainer_is_refused(name: str, instead: str) -> None:
    text = said(lambda: check_names(with_methods(name), "MyTask"))
    assert f"MyTask.{name}() is called by nothing: not by samecurve, and by no other" in text
    assert f"remedy: {instead}" in text


def test_a_value_of_a_near_name_is_refused() -> None:
    text = said(lambda: check_names(with_methods(elementwize=True), "MyTask"))
    assert "MyTask.elementwize is called by nothing" in text
    assert "elementwise = True: that optimizer" in text


class Helped:
    """Every one of these names would be refused if nothing used it."""

    metric = "accuracy"

    def model(self) -> object:
        return self.configure_model()

    def configure_model(self) -> object:
        return Helped.collate_fn([self.scheduler])

    @functools.cached_property
    def scheduler(self) -> object:
        return [self.train_dataset() for _ in range(2)]

    def train_dataset(self) -> object:
        return getattr(self, "val_dataset")()  # noqa: B009 by a name in quotes

    def val_dataset(self) -> object:
        return map(lambda _: self.eval_metrics(), [0])  # noqa: C417 a function within

    def eval_metrics(self) -> None: ...

    @staticmethod
    def collate_fn(rows: object) -> object:
        return rows

    def _forward(self) -> None: ...

    def encode(self) -> None: ...

    def augment(self) -> None: ...

    def losses(self) -> None: ...

    def tokens(self) -> None: ...


class Derived(Helped):
    def compute_loss(self) -> None: ...

    def encode(self) -> None:
        super().compute_loss()  # type: ignore[misc]


class Net(nn.Module):
    def model(self) -> nn.Module:
        return Net()

    def forward(self, x: object) -> object:
        return x

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {}


class Rows(Dataset[int]):
    def collate(self, samples: list[int]) -> list[int]:
        return samples


@pytest.mark.parametrize("task", [Helped(), Derived(), Net(), Rows(), with_methods("my_own", "go")])
def test_helpers_may_have_any_name_that_their_class_uses(task: object) -> None:
    """And what overrides torch's own methods is torch's to call."""
    check_names(task, "MyTask")
    check_signatures(task, "MyTask")


def test_what_a_library_of_modules_is_called_like_is_no_use_of_a_method() -> None:
    """torch.optim.lr_scheduler in optimizer() is not self.lr_scheduler."""
    task = with_methods(
        "lr_scheduler", optimizer=lambda _, params: torch.optim.lr_scheduler.LinearLR(params)
    )
    assert "MyTask.lr_scheduler() is called by nothing" in said(lambda: check_names(task, "MyTask"))
    assert other_trainers(task) == ["lr_scheduler"]


def test_a_base_of_another_package_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("Module", (), {"__file__": "/x/site-packages/other/trainer.py"})
    monkeypatch.setitem(__import__("sys").modules, "other.trainer", module)
    base = type("Base", (), {"__module__": "other.trainer", "training_step": lambda self: self})
    check_names(with_methods(base=base), "MyTask")
    with pytest.raises(Exception, match="training_step"):
        check_names(with_methods("training_step", base=base), "MyTask")


def with_member(name: str, method: object) -> object:
    return type("MyTask", (), {name: method})()


def method_of(parameters: str) -> Callable[..., object]:
    function: Callable[..., object] = eval(f"lambda {parameters}: None")
    return function


@pytest.mark.parametrize(
    ("member", "parameters", "words"),
    [
        ("loss", "self, batch, model", "MyTask.loss(self, batch, model) has its parameters in"),
        ("loss", "model, batch", "MyTask.loss(model, batch) lacks self"),
        ("loss", "self, batch", "has no place for batch"),
        ("loss", "self, model, batch, scale", "asks for scale, which it is not given"),
        ("loss", "self, model, batch, stp", "did you mean step?"),
        ("train_data", "self, split", "asks for split, which it is not given"),
        ("train_data", "", "MyTask.train_data() lacks self"),
        ("sample", "self, seed, model", "in another order"),
        ("respond", "self, model, prompt", "has no place for tokens, temperature and seed"),
        ("after_step", "self, model", "has no place for step"),
        ("optimizer", "self, lr, params", "in another order"),
    ],
)
def test_a_method_that_can_not_be_called_is_refused(
    member: str, parameters: str, words: str
) -> None:
    task = with_member(member, method_of(parameters))
    text = said(lambda: check_signatures(task, "MyTask"))
    assert words in text
    assert MEMBERS[member] in text or "did you mean" in text


@pytest.mark.parametrize(
    ("member", "parameters"),
    [
        ("loss", "self, net, rows"),
        ("loss", "self, model, batch, step, epoch=0, scale=1.0"),
        ("loss", "self, *arguments"),
        ("loss", "self, model, batch, **others"),
        ("model", "self, rngs, dtype"),
        ("optimizer", "self, params, lr"),
        ("train_data", "self, split='train'"),
        ("respond", "self, model, prompt, **others"),
    ],
)
def test_a_method_that_can_be_called_is_not(member: str, parameters: str) -> None:
    check_signatures(with_member(member, method_of(parameters)), "MyTask")


def test_every_method_says_how_it_is_called() -> None:
    """What is no method of an object is a value, a class or a staticmethod."""
    others = [member for member in MEMBERS if form_of(member) is None]
    assert all(
        MEMBERS[member].startswith((f"{member} = ", f"class {member}("))
        or "staticmethod" in MEMBERS[member]
        for member in others
    )
    form = form_of("respond")
    assert form is not None
    assert (form.needed, form.by_name) == (("model", "prompt"), ("tokens", "temperature", "seed"))
