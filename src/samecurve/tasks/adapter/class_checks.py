"""Checks of a task's class: its methods, its attributes and its phases.

They run once, when the task is opened, before any method of the class is called.
"""

from collections.abc import Mapping
from typing import Any

from samecurve.core.config.document import suggest
from samecurve.errors import UserError
from samecurve.tasks.adapter.members import check_names, check_signatures, other_trainers
from samecurve.tasks.adapter.returned import parameters_of
from samecurve.tasks.protocol import MEMBERS, TaskMethods

_WHOLE_BATCH = {name: MEMBERS[name] for name in ("features", "batch_loss")}  # in place of loss()


def check_class(task: object, methods: TaskMethods, name: str, needed: Mapping[str, str]) -> None:
    """UserError: a member is missing, hidden or mistaken, or of another form than MEMBERS says.

    name: the class's name
    needed: methods that every such class has, and how they are written
    """
    _check_hidden(task, name)
    _check_needed(task, name, needed)
    check_names(task, name)
    check_signatures(task, name)
    _check_attributes(methods, name)


def _check_attributes(methods: TaskMethods, name: str) -> None:
    """UserError: a value of the class has another form than MEMBERS says."""
    functions = {
        "optimizer": "optimizer(self, params) brings an optimizer",
        "collate": "collate(self, samples) pads samples of unlike length",
    }
    for member, meaning in functions.items():
        value = getattr(methods, member)
        if value is not None and not callable(value):
            cause = f"{name}.{member} is {type(value).__name__}, where a method {meaning}"
            raise UserError(cause, "another name for it", "task")
    meanings = {
        "elementwise": "the optimizer updates each number by itself, whatever the others are",
        "frozen_base": "what is not trained comes from elsewhere, and is not saved",
    }
    for member, meaning in meanings.items():
        value = getattr(methods, member)
        if not isinstance(value, bool):
            raise UserError(
                f"{name}.{member} is {value!r}", f"True: {meaning}; or leave it out", "task"
            )
    if methods.prepare is not None and methods.metrics is not None and not methods.metric_names:
        raise UserError(
            f"{name} has prepare() and metrics(), and no metric_names: what metrics() gives can't"
            " be learnt from a row before its files are made",
            'metric_names = ("loss", ...): the names that metrics() gives',
            "task",
        )
    words = methods.coupled
    if not isinstance(words, tuple | list) or not all(isinstance(word, str) for word in words):
        raise UserError(
            f"{name}.coupled is {words!r}",
            'a tuple of words for what mixes the samples of a batch: ("contrastive loss",)',
            "task",
        )


def _check_hidden(task: object, name: str) -> None:
    """UserError: __init__ has set a value under the name of a method."""
    for method in MEMBERS:
        value = getattr(task, "__dict__", {}).get(method)
        is_method = callable(getattr(type(task), method, None))
        if value is not None and is_method and not callable(value):
            raise UserError(
                f"{name}.__init__ sets self.{method}, which hides the method {method}()",
                f"keep it under another name, such as self.{method}_fields",
                "task",
            )


def _check_needed(task: object, name: str, needed: Mapping[str, str]) -> None:
    """UserError: a method that the class must have is missing, or it has two losses."""
    needed = _needed_by(task, name, needed)
    missing = [method for method in needed if not callable(getattr(task, method, None))]
    if not missing:
        return
    there = [member for member in dir(task) if not member.startswith("__")]
    hints = [hint for method in missing if (hint := suggest(method, there))]
    hints += [f"{method}() is called by other trainers" for method in other_trainers(task)]
    lacks = "; ".join([" and ".join(f"no {method}()" for method in missing), *hints])
    signatures = "\n    ".join(needed[method] for method in missing)
    raise UserError(f"{name} has {lacks}", signatures, "task")


def _needed_by(task: object, name: str, needed: Mapping[str, str]) -> Mapping[str, str]:
    """The methods that this class must have. UserError: it has two losses.

    A class with loss() may have a helper of its own that is called features().
    """
    has_loss, has_features = hasattr(task, "loss"), hasattr(task, "features")
    whole_batch = hasattr(task, "batch_loss")
    if "loss" not in needed or not (whole_batch or (has_features and not has_loss)):
        return needed
    if has_loss:
        raise UserError(
            f"{name} has two losses, loss() and batch_loss()",
            "leave one of them out: loss() where the loss is a sum over samples; features() and"
            " batch_loss() where samples of a batch see each other",
            "task",
        )
    others = {method: text for method, text in needed.items() if method != "loss"}
    return {**others, **_WHOLE_BATCH}


def read_phases(methods: TaskMethods, name: str) -> dict[str, tuple[str, ...]]:
    """The patterns of parameters by phase; empty: a step has one update.

    UserError: the class's phases are of another form, or its loss does not ask for them.
    """
    losses: dict[str, Any] = {"loss": methods.loss}
    if methods.batch_loss is not None:
        losses = {"features": methods.features, "batch_loss": methods.batch_loss}
    if not all(map(callable, losses.values())):
        return {}  # the engine-free part of a task
    phases = methods.phases
    if not isinstance(phases, Mapping):
        phases = {"": phases}
    read = {}
    for phase, patterns in phases.items():
        of_phase = (patterns,) if isinstance(patterns, str) else patterns
        is_list = isinstance(of_phase, tuple | list) and of_phase
        if not phase or not is_list or not all(isinstance(p, str) for p in of_phase):
            raise UserError(f"{name}.phases is {methods.phases!r}", MEMBERS["phases"], "task")
        read[str(phase)] = tuple(of_phase)
    asks = [method for method, bound in losses.items() if "phase" in parameters_of(bound)]
    if asks and not read:
        raise UserError(
            f"{name}.{asks[0]}() asks for a phase, and the class has no phases",
            MEMBERS["phases"],
            "task",
        )
    if read and not asks:
        *_, last = losses
        raise UserError(
            f"{name} has phases ({', '.join(read)}), and its {last}() does not ask which",
            f"phase among the parameters of {last}(): the loss is that phase's",
            "task",
        )
    return read
