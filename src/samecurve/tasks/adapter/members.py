"""Mistaken names and signatures of a task's members, told when the task is opened.

A public method is a helper of the class if the class's own code uses its name, or if a base from
torch or Python has it. A method that nothing in the class uses is meant to be called by a trainer:
it is refused if other trainers call such a method, or if its name is close to one of ours. Names
with an underscore in front are never looked at.
"""

import dis
import inspect
import re
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

from samecurve.core.config.document import suggest
from samecurve.errors import UserError
from samecurve.tasks.protocol import MEMBERS
from samecurve.units import join_words

_WITH_FLAX = {"model": ("dtype", "rngs")}
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NEAR = 0.84  # difflib's ratio: metric and metrics are near, losses and loss are not
_PLAIN = {"torch", "builtins", "abc", "typing", "collections"}  # packages without trainers

# names of other trainers' hooks
_HOOK = re.compile(r"on_(train|training|validation|val|test|epoch|fit|step|batch|before|after)_\w+")
# what other trainers call a method -> what does its work here
_FOREIGN = {
    "training_step train_step compute_loss forward": MEMBERS["loss"],
    "configure_optimizers configure_optimizer create_optimizer create_optimizer_and_scheduler"
    " get_optimizer make_optimizer build_optimizer": (
        f"the config's optimizer section, or {MEMBERS['optimizer']}"
    ),
    "lr_scheduler lr_schedule lr_lambda scheduler configure_scheduler create_scheduler"
    " get_scheduler": f"the config's schedule section, or {MEMBERS['schedule']}",
    "train_dataset train_dataloader train_loader training_data get_train_dataloader": (
        MEMBERS["train_data"]
    ),
    "eval_dataset eval_dataloader val_data val_dataset val_dataloader val_loader valid_data"
    " valid_dataset validation_data validation_dataset get_eval_dataloader": MEMBERS["eval_data"],
    "test_dataset test_dataloader test_loader get_test_dataloader": MEMBERS["test_data"],
    "validation_step val_step valid_step eval_step evaluation_step test_step prediction_step"
    " predict_step": (
        f"train.eval_every in the config evaluates on eval_data(); {MEMBERS['metrics']}"
    ),
    "metric compute_metrics get_metrics eval_metrics val_metrics": MEMBERS["metrics"],
    "configure_model model_init": MEMBERS["model"],
    "collate_fn data_collator collator": MEMBERS["collate"],
    "optimizer_step post_step": MEMBERS["after_step"],
    "clip_gradients configure_gradient_clipping": "optimizer.clip in the config",
    "on_load_checkpoint on_save_checkpoint state_dict load_state_dict": (
        "what is to be saved belongs into the model, as a parameter or a buffer (register_buffer)"
    ),
}
_INSTEAD = {name: remedy for names, remedy in _FOREIGN.items() for name in names.split()}


@dataclass(frozen=True)
class Form:
    """The parameters of a method, as MEMBERS says them."""

    needed: tuple[str, ...]  # given by place
    by_name: tuple[str, ...]  # always given by name
    optional: tuple[str, ...]  # given by name if the method asks for them


def form_of(member: str) -> Form | None:
    """The parameters in "loss(self, model, batch[, step])"; None: no method of an object."""
    match = re.match(r"\w+\(self(?:, )?([^)]*)\)", MEMBERS[member])
    if match is None:
        return None
    text = match[1]
    optional = re.findall(r"\[(?:, )?(\w+)\]", text)
    by_place, _, by_name = re.sub(r"\[[^]]*\]", "", text).partition("*, ")
    optional += _WITH_FLAX.get(member, ())
    return Form(
        tuple(re.findall(r"\w+", by_place)), tuple(re.findall(r"\w+", by_name)), tuple(optional)
    )


def other_trainers(task: object) -> list[str]:
    """The class's unused methods that other trainers would call."""
    return [name for name, value in _unused(type(task)) if callable(value) and _instead(name)]


def check_names(task: object, what: str) -> None:
    """UserError: a public member is used by nothing, and seems to be meant as one of ours.

    what: the class's name
    """
    for name, value in _unused(type(task)):
        if callable(value):
            instead = _instead(name) or _near(name, [m for m in MEMBERS if form_of(m)])
        else:
            instead = _near(name, [m for m in MEMBERS if MEMBERS[m].startswith(f"{m} = ")])
        if instead:
            shown = f"{name}()" if callable(value) else name
            raise UserError(
                f"{what}.{shown} is called by nothing: not by samecurve, and by no other method of"
                f" {what}",
                f"{instead}\n    (a helper may have any name that its class uses, and any with an"
                " underscore in front)",
                "task",
            )


def _instead(name: str) -> str | None:
    """The remedy for a name that another trainer calls; None: no trainer does."""
    return _INSTEAD.get(name) or (MEMBERS["after_step"] if _HOOK.fullmatch(name) else None)


def _near(name: str, members: list[str]) -> str | None:
    return next((MEMBERS[near] for near in get_close_matches(name, members, 1, _NEAR)), None)


def _unused(task_class: type) -> Iterator[tuple[str, Any]]:
    """The class's public members that are none of ours, and that none of its code reads."""
    own = dict(_own_members(task_class))
    names = {base.__name__ for base in task_class.__mro__}
    used = {name for value in own.values() for name in _read_by(value, names)}
    for name, value in own.items():
        if not name.startswith("_") and name not in MEMBERS and name not in used:
            yield name, value


def _own_members(task_class: type) -> Iterator[tuple[str, Any]]:
    """The members that the class and the user's bases of it define; the nearest first.

    Members that override one of torch's or Python's bases are left out: those bases use them.
    """
    mro = task_class.__mro__
    plain = [base for base in mro if base.__module__.partition(".")[0] in _PLAIN]
    theirs = {name for base in plain if base is not object for name in dir(base)}
    seen: set[str] = set()
    for base in mro:
        if base in plain or _is_of_library(base, task_class):
            continue
        for name, value in vars(base).items():
            if name not in theirs and name not in seen:
                seen.add(name)
                yield name, getattr(value, "__func__", value)


def _is_of_library(base: type, task_class: type) -> bool:
    """Whether a base is of an installed package that the task's class is no part of."""
    top = base.__module__.partition(".")[0]
    file = getattr(sys.modules.get(base.__module__), "__file__", None) or ""
    return top != task_class.__module__.partition(".")[0] and "site-packages" in file


def _read_by(value: object, classes: Container[str]) -> Iterator[str]:
    """The names that the code of a member reads of `self`, of its class or of its bases."""
    if isinstance(value, property | cached_property):
        value = getattr(value, "fget", None) or getattr(value, "func", None)
    function = inspect.unwrap(value) if callable(value) else None
    if isinstance(function, FunctionType):
        first = function.__code__.co_varnames[:1]
        yield from _read_in(function.__code__, {*first, "self", "cls"}, classes)


def _read_in(code: CodeType, objects: Container[str], classes: Container[str]) -> Iterator[str]:
    owner = False  # the last instruction put the object or its class on the stack
    for instruction in dis.get_instructions(code):
        if "ATTR" in instruction.opname or "METHOD" in instruction.opname:
            if owner or "super" in code.co_names:
                yield str(instruction.argval)
            owner = False
        elif "LOAD_" in instruction.opname:  # Python 3.13 has STORE_FAST_LOAD_FAST, too
            loaded = instruction.argval
            loaded = loaded[-1] if isinstance(loaded, tuple) and loaded else loaded
            owner = isinstance(loaded, str) and (loaded in objects or loaded in classes)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read_in(constant, objects, classes)
        elif isinstance(constant, str):
            yield constant  # getattr(self, "helper")


def check_signatures(task: object, what: str) -> None:
    """UserError: a method of the class can't be called as it is called here."""
    for member in MEMBERS:
        form, method = form_of(member), getattr(task, member, None)
        is_helper = member == "features" and not hasattr(task, "batch_loss")
        if form is None or is_helper or not inspect.isroutine(method):
            continue
        _check_signature(method, form, f"{what}.{member}", MEMBERS[member])


def _check_signature(method: Callable[..., Any], form: Form, what: str, usage: str) -> None:
    function = getattr(method, "__func__", method)
    written = list(inspect.signature(function).parameters)
    if function is not method and not written:
        raise UserError(f"{what}() lacks self, its first parameter", usage, "task")
    parameters = inspect.signature(method).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return
    by_place = [name for name, parameter in parameters.items() if parameter.kind in _BY_PLACE]
    lacking = list(form.needed[len(by_place) :])
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        lacking += [name for name in form.by_name if name not in parameters]
    shown = f"{what}({', '.join(written)})"
    if lacking and function is not method and written[0] in form.needed:
        raise UserError(f"{shown} lacks self, its first parameter", usage, "task")
    if lacking:
        raise UserError(f"{shown} has no place for {join_words(lacking)}", usage, "task")
    places = enumerate(by_place)
    if any(name in form.needed and form.needed.index(name) != place for place, name in places):
        raise UserError(f"{shown} has its parameters in another order", usage, "task")
    own = [name for name in parameters if name not in by_place[: len(form.needed)]]
    _check_own_parameters([parameters[name] for name in own], form, what, usage)


def _check_own_parameters(
    parameters: list[inspect.Parameter], form: Form, what: str, usage: str
) -> None:
    """UserError: a parameter beyond those given by place has no default and is not given."""
    known = (*form.by_name, *form.optional)
    for parameter in parameters:
        is_filled = parameter.kind is parameter.VAR_KEYWORD or parameter.name in known
        if parameter.default is parameter.empty and not is_filled:
            raise UserError(
                f"{what}() asks for {parameter.name}, which it is not given",
                suggest(parameter.name, known) or usage,
                "task",
            )
