"""Views of weights that a model or a task has kept since model() made them.

A view shows a weight while both lie in one memory. Shards, or another number format, give a weight
other memory: then the view keeps the first values, and a loss that reads it is wrong from the first
update on. What a forward pass makes anew is no such view: torch's old weight norm keeps one until
the first pass.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.torch_engine.model.model_builder import FirstMemory
from samecurve.torch_engine.step.setup import EngineSetup
from samecurve.torch_engine.strategies import Strategy
from samecurve.torch_engine.users_code.holders import holders, names_in, tensors_within

_DEPTH = 2  # of lists and dicts within an attribute


def refuse_stale_views(first: Sequence[FirstMemory], setup: EngineSetup) -> None:
    """Call it once a step has run.

    UserError: an attribute or a buffer is a view of memory that a weight no longer has.
    """
    strategy, task = setup.strategy, setup.task
    left = {each.memory.cdata: each.name for each in first if _was_left(each, strategy)}
    if not left:
        return
    for path, tensor in _kept_tensors(strategy.models, getattr(task, "task", task)):
        name = left.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - a storage's identity
        if name:
            raise _stale_error(path, name, setup.plan)


def _was_left(first: FirstMemory, strategy: Strategy) -> bool:
    """Whether something holds the memory, and the weight lies elsewhere."""
    if first.memory.expired():  # type: ignore[no-untyped-call]
        return False
    if strategy.gathers_weights:
        return True
    weight = dict(strategy.models[first.device_index].named_parameters())[first.name]
    return bool(first.memory.cdata != weight.untyped_storage()._cdata)  # noqa: SLF001


def _kept_tensors(models: Sequence[nn.Module], task: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory of their own in attributes and buffers, by path."""
    for model in models:
        named = [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
        for path, holder in holders(model, task).items():
            for name in names_in(holder):
                named += tensors_within(f"{path}.{name}", holder[name], _DEPTH)
        for path, tensor in named:
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
                yield path, tensor


def _stale_error(path: str, name: str, plan: Plan) -> UserError:
    where = f"under {plan.layout.strategy}, in {plan.compute.precision},"
    other = "; or --strategy ddp" if plan.layout.shards > 1 else ""
    return UserError(
        f"{path} is a view of the weight {name}, kept since model() made it. {where} the weight"
        " lies in other memory, and the view keeps the first values",
        f"make the view where it is used: in forward(), or in the loss{other}",
        "model",
    )
