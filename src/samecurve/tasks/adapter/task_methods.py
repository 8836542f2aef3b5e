"""The members of a task's object, looked up once, when the task is opened.

MEMBERS in tasks/protocol.py says what each member means. Model, Data, data_stamp, other_data and
first_weights are asked of the class, before there is an object: tasks/entry.py does that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

Method = Callable[..., Any]  # bound to the task's object


def _none(*_: object) -> None:
    """No value: the default of a method that may give nothing."""


@dataclass(frozen=True, kw_only=True)
class TaskMethods:
    """The members of one object, with a default for each that its class leaves out.

    A method of the class is bound to its object. None means that nothing takes its place; the
    comments say what the others stand for.
    """

    # a class has loss(), or features() with batch_loss(); the engine-free part of a task, neither
    model: Method | None = None
    loss: Method | None = None
    features: Method | None = None
    batch_loss: Method | None = None

    train_data: Method = _none  # every class has it
    eval_data: Method = _none  # no held-out data
    test_data: Method = _none
    collate: Method | None = None  # samples are stacked
    metrics: Method | None = None  # the loss alone is measured
    metric_names: Sequence[str] = ()  # learnt from one row
    summarize: Method | None = None  # each sum / weight

    initial: Method = _none  # the module's own values
    init_module: Method | None = None
    optimizer: Method | None = None  # the config's
    elementwise: bool = False
    phases: Any = field(default_factory=dict)  # class_checks.read_phases() reads them
    schedule: Method | None = None  # the config's
    after_step: Method | None = None
    coupled: Sequence[str] = ()
    frozen_base: bool = False
    leave_out: Method | None = None  # rows are computed one by one

    facts: Method = dict  # nothing is told
    fingerprint: Method | None = None  # a hash over some samples

    sample: Method | None = None  # nothing is shown
    respond: Method | None = None
    assets: Method = dict  # nothing is kept
    export: Method = _none  # nothing beside the weights
    export_hf: Method | None = None
    export_adapter: Method | None = None
    export_format: str = "safetensors"
    load_hf: Method | None = None  # the names are ours
    convert_weights: Method | None = None  # the arrays are as the model has them
    unlike: Method | None = None  # the `model:` sections are compared

    @classmethod
    def of(cls, task: object) -> "TaskMethods":
        """The members of one object."""
        names = [member.name for member in fields(cls) if hasattr(task, member.name)]
        return cls(**{name: getattr(task, name) for name in names})
