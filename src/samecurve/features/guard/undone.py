"""What forward passes beside a step change is put back, and looked at afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from samecurve.errors import RunError
from samecurve.torch_engine.step.setup import EngineSetup
from samecurve.torch_engine.users_code.side_effects import Attributes, Buffers, GeneratorStates


@contextmanager
def undone(setup: EngineSetup) -> Iterator[None]:
    """Put back what forward passes inside of it change beside gradients, on this process's devices.

    RunError: something is not as it was.
    """
    task = getattr(setup.task, "task", setup.task)
    noted: list[Attributes | Buffers | GeneratorStates] = []
    models = setup.strategy.models
    for model, device in zip(models, setup.devices[: len(models)], strict=True):
        attributes = Attributes(model, task)
        noted += [GeneratorStates(device, attributes.generators()), Buffers(model), attributes]
    try:
        yield
    finally:
        for each in noted:
            each.put_back()
    left = [name for each in noted for name in each.changed()]
    if left:
        raise RunError(
            f"a trial of the loss has changed {left[0]}, and it could not be put back",
            "this is a fault of the program's own: please report it, with the task's code",
        )
